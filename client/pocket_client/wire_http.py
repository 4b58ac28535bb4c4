"""Triton's generate extension: JSON requests out, JSON and server-sent events in."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pocket_client.errors import (
    InvalidRequestError,
    OverloadedError,
    PocketClientError,
    ServerError,
    error_of,
)
from pocket_client.options import ENSEMBLE, GenerationRequest
from pocket_client.results import Chunk
from pocket_client.transport import OutputValue, TensorValue
from pocket_client.wire_chunks import chunks_of

MAX_LINE = 16 << 20
"""Bytes of one response; a whole completion of a long context is far below."""


def generation_path(request: GenerationRequest) -> str:
    return f"/v2/models/{ENSEMBLE}/{'generate_stream' if request.stream else 'generate'}"


def generation_body(request: GenerationRequest, timeout: float | None) -> bytes:
    """The JSON object of a generation."""
    body: dict[str, object] = {
        "text_input": request.text,
        "messages": request.messages_json,
        "input_ids": None if request.input_ids is None else list(request.input_ids),
        "chat_template_kwargs": request.template_kwargs_json,
        **request.flags,
    }
    body = {name: value for name, value in body.items() if value is not None}
    body["id"] = request.request_id
    body["sampling_parameters"] = request.parameters_json(timeout)
    return json.dumps(body).encode()


def call_body(inputs: Mapping[str, TensorValue]) -> bytes:
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in inputs.items()}
    return json.dumps(values).encode()


def read_event(line: bytes) -> dict[str, object] | None:
    """The object of one line of an event stream; None for blank and other lines."""
    if not line.startswith(b"data:"):
        return None
    return parse_object(line[5:])


def parse_object(data: bytes) -> dict[str, object]:
    """A response of the server, checked for an error.

    Raises:
        PocketClientError: the error that it carries, or ServerError if it is not JSON.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ServerError(f"the server sent something that is not JSON: {data[:80]!r}")
    if "error" in value:
        raise error_of(str(value["error"]))
    return value


def read_chunks(value: Mapping[str, object], request: GenerationRequest) -> list[Chunk]:
    """The chunks of one JSON response. Triton writes a vector of one element as a bare value."""
    return chunks_of(
        {name: item if isinstance(item, list) else [item] for name, item in value.items()}, request
    )


def output_of(value: Mapping[str, object], name: str) -> OutputValue:
    try:
        found = value[name]
        return found if isinstance(found, str) else ids_of(found)
    except (KeyError, ValueError) as error:
        raise ServerError(f"the server sent a malformed response ({error!r})") from None


def ids_of(value: object) -> tuple[int, ...]:
    """Triton writes a vector of one element as a bare number."""
    items = value if isinstance(value, list) else [value]
    if not all(type(item) is int for item in items):
        raise ValueError("not a list of integers")
    return tuple(items)


def status_error(status: int, body: bytes) -> PocketClientError:
    """The typed error for an answer with an HTTP status of 400 or more."""
    line = body.strip().removeprefix(b"data:")
    try:
        parse_object(line)
    except ServerError as error:
        if status in (413, 414):
            return InvalidRequestError(f"the request is too large (HTTP {status})")
        if status in (429, 503):
            return OverloadedError(f"HTTP {status}: {error}")
        return ServerError(f"HTTP {status}: {error}")
    except PocketClientError as error:
        return error
    return ServerError(f"HTTP {status}")
