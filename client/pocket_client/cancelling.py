"""Cancelling by request id, for requests that nobody reads any more.

Triton tells a running ensemble late or never that a client is gone: the next chunk has to meet the
cancelled stream, and a request that waits or prefills has no next chunk yet. So an abandoned
request is cancelled by its id, through the generator's ``control`` input. That also ends its
stream; cancelling a gRPC stream itself is the last resort (``transport.ChunkStream`` says why).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from pocket_client.errors import (
    DeadlineExceededError,
    PocketClientError,
    ServerError,
    UnavailableError,
)
from pocket_client.transport import OutputValue, TensorValue

CALL_SECONDS = 2.0
DRAIN_SECONDS = 1.0
"""How long an abandoned gRPC stream may take to end once its request was cancelled by id."""
_WAITS = (0.05, 0.2, 0.8)
"""Between attempts: a request that is still being tokenized is not known to the generator yet."""


def cancel_message(request_id: str) -> Mapping[str, TensorValue]:
    return {"control": json.dumps({"cancel_request_id": request_id})}


def cancelled_count(answer: OutputValue) -> int:
    return int(str(read_control(answer).get("cancelled", 0)))


def read_control(answer: OutputValue) -> dict[str, object]:
    """The object in ``control_result``."""
    try:
        value = json.loads(answer) if isinstance(answer, str) else None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServerError("the generator's answer to a control message is not a JSON object")
    return value


def waits(received: bool) -> Iterator[float]:
    """Seconds to wait before each further attempt that found nothing to cancel.

    Once chunks have arrived the generator knows the request: not found then means finished.
    """
    return iter(()) if received else iter(_WAITS)


def ends_alone(error: PocketClientError) -> bool:
    """Whether the request has ended on the server, too, so that there is nothing to cancel."""
    return error.from_server or not isinstance(error, UnavailableError | DeadlineExceededError)
