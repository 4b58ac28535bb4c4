"""Errors as Triton responses."""

from __future__ import annotations

from typing import Any

from pocket_backend.api.errors import PocketLLMError

_MAX_MESSAGE = 2000

_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "UNIMPLEMENTED": "UNSUPPORTED",
    "UNAVAILABLE": "UNAVAILABLE",
    "CANCELLED": "CANCELLED",
    # Triton has no code for deadlines; UNAVAILABLE would invite a retry of what was too slow.
    "DEADLINE_EXCEEDED": "CANCELLED",
    "FAILED_PRECONDITION": "INTERNAL",
    "INTERNAL": "INTERNAL",
}


def triton_error(pb_utils: Any, error: BaseException) -> Any:
    """``pb_utils.TritonError`` with the message that a client may see and the nearest code."""
    if isinstance(error, PocketLLMError):
        name, message = _CODES[error.grpc_code], str(error)
    else:
        name, message = "INTERNAL", f"internal error: {type(error).__name__}"
    message = message[:_MAX_MESSAGE]
    code = getattr(pb_utils.TritonError, name, None)
    return pb_utils.TritonError(message) if code is None else pb_utils.TritonError(message, code)


def error_response(pb_utils: Any, error: BaseException) -> Any:
    return pb_utils.InferenceResponse(error=triton_error(pb_utils, error))
