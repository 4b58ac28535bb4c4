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


def error_response(
    pb_utils: Any, error: BaseException, *, key: str = "", client_id: str = ""
) -> Any:
    """The response that ends a failed request: the message that a client may see, nearest code.

    ``key`` is the engine's id of the request, which clients do not know; their own id replaces it.
    """
    if isinstance(error, PocketLLMError):
        name, message = _CODES[error.grpc_code], _in_client_terms(error, key, client_id)
    else:
        name, message = "INTERNAL", f"internal error: {type(error).__name__}"
    message = message[:_MAX_MESSAGE]
    code = getattr(pb_utils.TritonError, name, None)
    made = pb_utils.TritonError(message) if code is None else pb_utils.TritonError(message, code)
    return pb_utils.InferenceResponse(error=made)


def _in_client_terms(error: PocketLLMError, key: str, client_id: str) -> str:
    message = str(error)
    if key and key in message:
        shown = f"request {client_id!r}: " if client_id else ""
        message = message.replace(f"request {key!r}: ", shown).replace(key, client_id)
    # The engine names the prompt after its own argument.
    field = getattr(error, "field", None)
    return "prompt" + message.removeprefix(field) if field == "prompt_tokens" else message
