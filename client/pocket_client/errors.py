"""Typed errors, and how they are told apart.

Triton 2.51 sends an error of a stream as bare text: no gRPC status, and HTTP 400 whatever happened
(the ``triton_grpc_error`` header, which would bring the status, makes that server crash). So the
text decides; ``tests/gateway/test_contract.py`` holds it against a real server.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pocket_client.options import WIRE_FIELDS

_MAX_MESSAGE = 2000
_PREFIX = re.compile(r"^(?:in ensemble '[^']*', )?(?:request '[^']*': )?")
_FIELD = re.compile(r"^([A-Za-z_]\w{0,63})((?:\[\d+\]|\.\w+)*): ")
_UNSUPPORTED = re.compile(r"^unsupported: ([\w ]{1,64}?)(?:: (.*))?$", re.DOTALL)
_DEADLINE = re.compile(r"^not finished within [\d.]+ s of arrival")
_OVERLOADED = re.compile(r"try again later|retry later")
_STOPPING = re.compile(r"shutting down|Server is stopping")  # the engine's word, and Triton's
_NO_MODEL = re.compile(r"^Request for unknown model: ")
# Triton calls these UNAVAILABLE: the model is being unloaded, or not yet loaded.
_NOT_READY = re.compile(r"has no available versions|is not at ready state")
_CANCELLED = re.compile(r"^(was )?cancelled\b", re.IGNORECASE)


class PocketClientError(Exception):
    """Base of every error that this package raises on purpose; the message is for people."""

    http_status: ClassVar[int] = 500
    """What an HTTP front end answers."""
    from_server: bool = False
    """Whether the server itself ended the request with this error."""

    @property
    def message(self) -> str:
        return str(self)


class InvalidRequestError(PocketClientError):
    """The request can never succeed as it is. ``field`` names what is wrong, if one thing is."""

    http_status = 400

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedError(InvalidRequestError):
    """A known field or value whose feature the server does not have."""

    def __init__(self, message: str, *, field: str | None = None, feature: str = "") -> None:
        super().__init__(message, field=field)
        self.feature = feature
        """As the server calls it, such as ``penalties``."""


class ModelNotFoundError(PocketClientError):
    """The server knows no model of that name."""

    http_status = 404


class UnavailableError(PocketClientError):
    """The server could not be reached, or went away."""

    http_status = 503


class OverloadedError(UnavailableError):
    """The server answers, but its queue is full or it is shutting down."""


class ShuttingDownError(OverloadedError):
    """The server takes no more requests, or its model is not loaded; another server, or its
    successor, may answer."""


class RequestCancelledError(PocketClientError):
    """Somebody cancelled the request by its id, or the client was closed."""

    http_status = 499


class DeadlineExceededError(PocketClientError):
    """Not finished within the timeout."""

    http_status = 504


class ServerError(PocketClientError):
    """The server failed, or said something that is not the protocol."""


def error_of(message: str) -> PocketClientError:
    """The typed error for an error text of the server, with Triton's wrapping removed."""
    error = _classified(_PREFIX.sub("", message)[:_MAX_MESSAGE])
    error.from_server = True
    return error


def _classified(text: str) -> PocketClientError:
    if found := _UNSUPPORTED.match(text):
        name, rest = found.group(1), found.group(2)
        inner = _FIELD.match(rest or "")
        field = _known(inner) or (name if name in WIRE_FIELDS else None)
        return UnsupportedError(text, field=field, feature=name)
    if _DEADLINE.match(text):
        return DeadlineExceededError(text)
    if _CANCELLED.match(text):
        return RequestCancelledError(text)
    if _NO_MODEL.match(text):
        return ShuttingDownError(text) if _NOT_READY.search(text) else ModelNotFoundError(text)
    if found := _FIELD.match(text):
        if field := _known(found):
            return InvalidRequestError(text, field=field)
        if text[found.end() :].startswith("unknown field"):
            return InvalidRequestError(text, field=found.group(1))
    if _STOPPING.search(text):
        return ShuttingDownError(text)
    if _OVERLOADED.search(text):
        return OverloadedError(text)
    return ServerError(text or "the server sent an error without a message")


def _known(found: re.Match[str] | None) -> str | None:
    if found is None or found.group(1) not in WIRE_FIELDS:
        return None
    return found.group(1) + found.group(2)
