"""Every failure as OpenAI's error object: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pocket_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PocketClientError,
    RequestCancelledError,
    UnavailableError,
    UnsupportedError,
)

_MAX_MESSAGE = 1000
_MAX_PARAM = 100
RETRY_AFTER_SECONDS = 1


class ApiError(Exception):
    """What a client gets in place of an answer. Not a ValueError: validators let it pass."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:_MAX_MESSAGE]
        self.code = code
        self.param = None if param is None else param[:_MAX_PARAM]
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        inner = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": inner}).encode()


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    text = message if param is None else f"{param}: {message}"
    return ApiError(400, text, param=param, code=code)


def unsupported(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param}: {reason}", param=param, code="unsupported_parameter")


def overloaded(message: str) -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
    return ApiError(503, message, code="overloaded", headers=headers)


def too_many(message: str, retry_after: int = RETRY_AFTER_SECONDS) -> ApiError:
    headers = {"retry-after": str(retry_after)}
    return ApiError(
        429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers=headers
    )


def from_upstream(error: PocketClientError, names: Mapping[str, str]) -> ApiError:
    """``names``: what the client calls a field or feature of the wire, where that differs."""
    match error:
        case InvalidRequestError():
            param, message = _renamed(error, names)
            code = "unsupported_parameter" if isinstance(error, UnsupportedError) else None
            if code is None and "context holds" in message:
                code = "context_length_exceeded"
            return ApiError(400, message, param=param, code=code)
        case OverloadedError():
            return overloaded(error.message)
        case UnavailableError():
            headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
            # The transport's own words name hosts and ports that are none of the client's business.
            message = "the model server cannot be reached"
            return ApiError(503, message, code="upstream_unavailable", headers=headers)
        case ModelNotFoundError():
            return ApiError(503, "the model is not loaded", code="upstream_unavailable")
        case DeadlineExceededError():
            return ApiError(504, error.message, code="timeout")
        case RequestCancelledError():
            return ApiError(499, "the request was cancelled", code="request_cancelled")
    return ApiError(500, error.message, code="upstream_error")


def _renamed(error: InvalidRequestError, names: Mapping[str, str]) -> tuple[str | None, str]:
    message, field = error.message, error.field
    if field is None:
        feature = error.feature if isinstance(error, UnsupportedError) else ""
        return names.get(feature), message
    root = field.split(".")[0].split("[")[0]
    if root not in names:
        return field, message
    param = names[root] + field[len(root) :]
    return param, param + message.removeprefix(field) if message.startswith(field) else message


def from_validation(errors: Sequence[Mapping[str, object]]) -> ApiError:
    """The first of pydantic's complaints. Its input is never echoed: it may be huge or secret."""
    first = errors[0]
    location = first.get("loc")
    path = list(location) if isinstance(location, tuple | list) else []
    kind, reason = str(first.get("type")), str(first.get("msg"))
    if kind == "json_invalid":
        return bad_request(None, "the body is not valid JSON", code="invalid_json")
    if path[:1] == ["body"]:
        path = path[1:]
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    if kind == "extra_forbidden":
        return ApiError(
            400,
            f"{param[:_MAX_PARAM]}: unknown field; docs/gateway.md lists the fields that exist",
            param=param,
            code="unknown_parameter",
        )
    if not param:
        return bad_request(
            None, "the body must be a JSON object, sent with Content-Type: application/json"
        )
    if kind == "missing":
        return ApiError(400, f"{param}: is required", param=param, code="missing_parameter")
    return ApiError(400, f"{param[:_MAX_PARAM]}: {reason}", param=param)
