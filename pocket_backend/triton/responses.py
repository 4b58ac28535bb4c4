"""Errors as Triton responses, and as a tensor that travels to the end of the ensemble.

Triton 2.51 never finishes an ensemble request whose decoupled step answers with an error while an
earlier response of it is still in the next step: the models can then not be unloaded, and a stop
takes its whole timeout.  So inside the ensemble the generator sends an error as an ordinary last
response with the ``error`` output set, and the detokenizer, which sees a stream's chunks in order,
turns it into the error response.
"""

from __future__ import annotations

import logging
from typing import Any

from pocket_backend.api.errors import PocketLLMError
from pocket_backend.observability.logging import log_event

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
    return _response(pb_utils, *_code_and_message(error, key, client_id))


def error_text(error: BaseException, *, key: str = "", client_id: str = "") -> str:
    """The ``error`` output for a failed request; empty means none."""
    code, message = _code_and_message(error, key, client_id)
    return f"{code}: {message}"


def response_of_text(pb_utils: Any, text: str) -> Any:
    """The error response for a non-empty ``error`` output; anybody may have sent the text."""
    code, _, message = text[: _MAX_MESSAGE + 32].partition(": ")
    return _response(pb_utils, code if code in _CODES.values() else "UNKNOWN", message)


def log_refusal(logger: logging.Logger, request: Any, error: PocketLLMError) -> None:
    """One line for a request that was not admitted. Without the message, which may repeat part of
    what the client sent."""
    log_event(
        logger,
        logging.INFO,
        "request refused",
        client_request_id=request.request_id() or None,
        error=type(error).__name__,
        field=getattr(error, "field", None),
    )


def _response(pb_utils: Any, code: str, message: str) -> Any:
    number = getattr(pb_utils.TritonError, code, None)
    arguments = (message,) if number is None else (message, number)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(*arguments))


def _code_and_message(error: BaseException, key: str, client_id: str) -> tuple[str, str]:
    if isinstance(error, PocketLLMError):
        code, message = _CODES[error.grpc_code], _in_client_terms(error, key, client_id)
    else:
        code, message = "INTERNAL", f"internal error: {type(error).__name__}"
    return code, message[:_MAX_MESSAGE]


def _in_client_terms(error: PocketLLMError, key: str, client_id: str) -> str:
    message = str(error)
    if key and key in message:
        shown = f"request {client_id!r}: " if client_id else ""
        message = message.replace(f"request {key!r}: ", shown).replace(key, client_id)
    # The engine names the prompt after its own argument.
    field = getattr(error, "field", None)
    return "prompt" + message.removeprefix(field) if field == "prompt_tokens" else message
