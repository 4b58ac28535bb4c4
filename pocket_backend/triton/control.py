"""Messages to the generator that are not generation requests: cancel and statistics.

They travel in the generator's ``control`` input as a JSON object with one key:

    {"cancel_request_id": "<id>"}    end every open request of that id
    {"stats": true}                  counters, gauges and health

The answer is one response whose ``control_result`` is a JSON object.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pocket_backend.api.errors import InvalidRequestError

_MAX_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Control:
    """Exactly one field is set."""

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
            case {"cancel_request_id": str(name)} if name:
                return Control(cancel_request_id=name)
            case {"stats": True}:
                return Control(stats=True)
    raise InvalidRequestError.of(
        "control", text, "must be a JSON object with one of cancel_request_id, stats"
    )
