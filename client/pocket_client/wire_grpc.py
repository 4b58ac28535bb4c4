"""Triton's protobuf messages: requests out, chunks and errors in.

Every request travels on a ``ModelStreamInfer`` RPC of its own. tritonclient's client class allows
one such stream per object; the generated stubs, used here, allow any number on one channel.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from pocket_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PocketClientError,
    RequestCancelledError,
    ServerError,
    UnavailableError,
    error_of,
)
from pocket_client.options import ENSEMBLE, GenerationRequest
from pocket_client.results import Chunk
from pocket_client.transport import OutputValue, TensorValue
from pocket_client.wire_chunks import chunks_of, wanted_outputs

CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),  # ours know what is safe to repeat
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
)
_LENGTH = struct.Struct("<I")
_CODES = {"INT32": "i", "UINT32": "I", "FP32": "f"}


def generation_message(
    request: GenerationRequest, timeout: float | None, model: str = ENSEMBLE
) -> Any:
    """The ``ModelInferRequest`` of a generation."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request.request_id)
    if request.text is not None:
        _add(message, "text_input", request.text)
    if request.messages_json is not None:
        _add(message, "messages", request.messages_json)
    if request.input_ids is not None:
        _add(message, "input_ids", request.input_ids)
    if request.template_kwargs_json is not None:
        _add(message, "chat_template_kwargs", request.template_kwargs_json)
    for name, flag in request.flags.items():
        _add(message, name, flag)
    _add(message, "sampling_parameters", request.parameters_json(timeout))
    for name in wanted_outputs(request):
        message.outputs.add(name=name)
    return message


def call_message(model: str, inputs: Mapping[str, TensorValue], output: str) -> Any:
    """A ``ModelInferRequest`` of plain values for one output."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in inputs.items():
        _add(message, name, value)
    message.outputs.add(name=output)
    return message


def _add(message: Any, name: str, value: TensorValue) -> None:
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")  # refused by the server, by name
        message.inputs.add(name=name, datatype="BYTES", shape=[1])
        message.raw_input_contents.append(_LENGTH.pack(len(data)) + data)
    elif isinstance(value, bool):
        message.inputs.add(name=name, datatype="BOOL", shape=[1])
        message.raw_input_contents.append(b"\1" if value else b"\0")
    else:
        message.inputs.add(name=name, datatype="INT32", shape=[len(value)])
        message.raw_input_contents.append(struct.pack(f"<{len(value)}i", *value))


def read_chunks(response: Any, request: GenerationRequest) -> list[Chunk]:
    """The chunks of a ``ModelStreamInferResponse``; none if it is only a final flag.

    Raises:
        PocketClientError: the error that it carries, or ServerError if it is malformed.
    """
    outputs = _outputs(response)
    if not outputs:
        return []
    kinds = {output.name: output.datatype for output in response.infer_response.outputs}
    try:
        values = {name: _values(kinds[name], raw) for name, raw in outputs.items()}
    except (KeyError, struct.error, UnicodeDecodeError) as error:
        raise ServerError(f"the server sent a malformed response ({error!r})") from None
    return chunks_of(values, request)


def read_output(response: Any, name: str) -> OutputValue | None:
    """One output of a response to ``call_message``; None if it is only a final flag."""
    outputs = _outputs(response)
    if not outputs:
        return None
    kinds = {output.name: output.datatype for output in response.infer_response.outputs}
    try:
        return _text(outputs[name]) if kinds[name] == "BYTES" else _ids(outputs[name])
    except (KeyError, struct.error, UnicodeDecodeError) as error:
        raise ServerError(f"the server sent a malformed response ({error!r})") from None


def _outputs(response: Any) -> dict[str, bytes]:
    if response.error_message:
        raise error_of(response.error_message)
    inner = response.infer_response
    return {
        output.name: raw
        for output, raw in zip(inner.outputs, inner.raw_output_contents, strict=False)
    }


def _values(kind: str, raw: bytes) -> tuple[Any, ...]:
    """All elements of a tensor."""
    return _texts(raw) if kind == "BYTES" else struct.unpack(f"<{len(raw) // 4}{_CODES[kind]}", raw)


def _texts(raw: bytes) -> tuple[str, ...]:
    found = []
    at = 0
    while at < len(raw):
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size + length
        found.append(raw[at - length : at].decode())
    return tuple(found)


def _text(raw: bytes) -> str:
    """The first element of a BYTES tensor."""
    return next(iter(_texts(raw)), "")


def _ids(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 4}i", raw)


def rpc_error(error: Any) -> PocketClientError:
    """The typed error for a failed RPC."""
    code, details = error.code(), error.details() or ""
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(f"the server cannot be reached: {details}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError("not finished within the timeout")
        case grpc.StatusCode.CANCELLED:
            return RequestCancelledError("the request was cancelled")
        case grpc.StatusCode.NOT_FOUND:
            return ModelNotFoundError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than" in details:
            return InvalidRequestError(f"the request is too large: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadedError(details)
        case grpc.StatusCode.INVALID_ARGUMENT:
            found = error_of(details)
            return found if isinstance(found, InvalidRequestError) else InvalidRequestError(details)
    return ServerError(f"{code.name}: {details}")


def ended_early() -> PocketClientError:
    return UnavailableError("the server ended the stream without a final response")
