"""Messages to the generator that are not generation requests: cancel and statistics.

They travel in the generator's ``control`` input as a JSON object with one key:

    {"cancel_key": "<stream_key of a response>"}     the detokenizer, when the client is gone
    {"cancel_request_id": "<id>"}                    clients; every open request of that id
    {"stats": true}                                  counters and gauges

The answer is one response whose ``control_result`` is a JSON object.  Stream keys are random and
never leave the server through the ensemble.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pocket_backend.api.errors import InvalidRequestError
from pocket_backend.triton import codec

GENERATOR = "generator"
_MAX_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Control:
    """Exactly one field is set."""

    cancel_key: str | None = None
    cancel_request_id: str | None = None
    stats: bool = False


def parse_control(text: object) -> Control:
    """Raises InvalidRequestError unless ``text`` is one of the objects above."""
    try:
        value = json.loads(text) if isinstance(text, str) and len(text) <= _MAX_CHARS else None
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and len(value) == 1:
        match value:
            case {"cancel_key": str(key)}:
                return Control(cancel_key=key)
            case {"cancel_request_id": str(name)} if name:
                return Control(cancel_request_id=name)
            case {"stats": True}:
                return Control(stats=True)
    raise InvalidRequestError.of(
        "control", text, "must be a JSON object with one of cancel_key, cancel_request_id, stats"
    )


def cancel_stream(pb_utils: Any, key: str) -> None:
    """Tell the generator, from another model of this server, that nobody reads this stream."""
    request = pb_utils.InferenceRequest(
        model_name=GENERATOR,
        requested_output_names=["control_result"],
        inputs=[codec.text(pb_utils, "control", json.dumps({"cancel_key": key}))],
    )
    for _ in request.exec(decoupled=True):
        pass
