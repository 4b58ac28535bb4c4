"""Typed errors, each with the codes that HTTP and gRPC front ends send.

A message names the field, the value (never a large one) and the remedy.
"""

from __future__ import annotations

from typing import ClassVar

_MAX_ECHO = 64


def short_repr(value: object) -> str:
    """``repr(value)`` cut to a length that is safe to send back to a client."""
    if isinstance(value, str | bytes) and len(value) > _MAX_ECHO:
        return f"{value[:_MAX_ECHO]!r}... ({len(value)} long)"
    if isinstance(value, list | tuple | dict | set | frozenset) and len(value) > 8:
        return f"{type(value).__name__} of {len(value)} items"
    text = repr(value)
    return text if len(text) <= 2 * _MAX_ECHO else f"{text[:_MAX_ECHO]}... ({len(text)} long)"


class PocketLLMError(Exception):
    """Base of every error that this project raises on purpose."""

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"


class ConfigurationError(PocketLLMError):
    """The server or engine was started with settings that cannot work."""

    http_status = 500
    grpc_code = "FAILED_PRECONDITION"


class InvalidRequestError(PocketLLMError):
    """A request that no retry can make valid.

    ``field`` is the name that the client used; the message repeats it.
    """

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def of(cls, field: str, value: object, remedy: str) -> InvalidRequestError:
        """The usual form: ``temperature: got nan; must be a finite number from 0 to 100``."""
        return cls(f"{field}: got {short_repr(value)}; {remedy}", field=field)


class UnsupportedFeatureError(InvalidRequestError):
    """A documented field or option whose feature this build or backend does not have."""

    grpc_code = "UNIMPLEMENTED"

    def __init__(self, feature: str, detail: str = "", *, field: str | None = None) -> None:
        super().__init__(f"unsupported: {feature}{': ' + detail if detail else ''}", field=field)
        self.feature = feature


class ModelLoadError(PocketLLMError):
    """A model file is missing, truncated, inconsistent or of an unknown kind."""

    http_status = 500
    grpc_code = "FAILED_PRECONDITION"


class BackendUnavailableError(PocketLLMError):
    """The backend exists but cannot run here (a package or instruction set is missing)."""

    http_status = 503
    grpc_code = "UNAVAILABLE"


class BackendNotImplementedError(PocketLLMError):
    """No backend of that name, or it does not implement the call."""

    http_status = 501
    grpc_code = "UNIMPLEMENTED"


class OverloadedError(PocketLLMError):
    """The waiting queue is full, or the server is draining: try again later or elsewhere."""

    http_status = 503
    grpc_code = "UNAVAILABLE"


class RequestCancelledError(PocketLLMError):
    """The client cancelled or went away."""

    http_status = 499
    grpc_code = "CANCELLED"


class DeadlineExceededError(PocketLLMError):
    """The request's own deadline passed before it finished."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"


class EngineError(PocketLLMError):
    """Computing this request failed; the engine goes on unless it is reported dead."""


class TensorParallelSupervisorError(PocketLLMError):
    """A worker of a tensor-parallel group failed."""
