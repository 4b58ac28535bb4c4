"""Exit statuses of `pocketllm`, and how an error becomes one.

| Status | Meaning | What helps |
|---|---|---|
| 0 | done; also a server that Ctrl-C stopped while it served | |
| 1 | it failed | the message |
| 2 | wrong usage: an option, its value, or a request that can never succeed | `--help` |
| 3 | the model is missing, damaged or of an unknown kind | `pocketllm inspect` |
| 4 | the server or backend is unreachable, overloaded or too slow | try again |
| 130 | interrupted | |
"""

from __future__ import annotations

import sys

from pocket_backend.api.errors import (
    BackendUnavailableError,
    DeadlineExceededError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    PocketLLMError,
)

OK = 0
FAILED = 1
USAGE = 2
MODEL = 3
UNAVAILABLE = 4
INTERRUPTED = 130

_CLIENT_STATUSES = {
    "InvalidRequestError": USAGE,
    "UnsupportedError": USAGE,
    "UnavailableError": UNAVAILABLE,
    "OverloadedError": UNAVAILABLE,
    "ShuttingDownError": UNAVAILABLE,
    "DeadlineExceededError": UNAVAILABLE,
    "ModelNotFoundError": MODEL,
}


def status_of(error: Exception) -> int | None:
    """The status for an error that was raised on purpose; None for a defect of ours."""
    match error:
        case InvalidRequestError():
            return USAGE
        case ModelLoadError():
            return MODEL
        case BackendUnavailableError() | OverloadedError() | DeadlineExceededError():
            return UNAVAILABLE
        case PocketLLMError():
            return FAILED
    client = sys.modules.get("pocket_client.errors")  # loaded by the commands that use it
    if client is not None and isinstance(error, client.PocketClientError):
        return _CLIENT_STATUSES.get(type(error).__name__, FAILED)
    return None
