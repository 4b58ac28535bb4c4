"""Triton's protobuf messages: requests out, chunks and errors in.

Every request travels on a ``ModelStreamInfer`` RPC of its own. tritonclient's client class allows
one such stream per object; the generated stubs, used here, allow any number on one channel.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, get_args

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
from pocket_client.results import Chunk, FinishReason, Usage, stop_reason_of
from pocket_client.transport import OutputValue, TensorValue

CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),  # ours know what is safe to repeat
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
)
FINISH_REASONS = frozenset(get_args(FinishReason))
_OUTPUTS = (
    "text_output",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "num_input_tokens",
    "num_output_tokens",
    "num_cached_tokens",
)
_LENGTH = struct.Struct("<I")


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
    for name in _OUTPUTS:
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


def read_chunk(response: Any, request: GenerationRequest) -> Chunk | None:
    """The chunk of a ``ModelStreamInferResponse``; None if it is only a final flag.

    Raises:
        PocketClientError: the error that it carries, or ServerError if it is malformed.
    """
    outputs = _outputs(response)
    if not outputs:
        return None
    try:
        reason = _text(outputs["finish_reason"])
        if reason and reason not in FINISH_REASONS:
            raise ServerError(f"the server sent an unknown finish reason: {reason[:32]!r}")
        return Chunk(
            _text(outputs["text_output"]),
            _ids(outputs["token_ids"]),
            reason or None,  # type: ignore[arg-type]
            stop_reason_of(_text(outputs["stop_reason"]), request.stop_token_ids),
            Usage(
                _LENGTH.unpack(outputs["num_input_tokens"])[0],
                _LENGTH.unpack(outputs["num_output_tokens"])[0],
                _LENGTH.unpack(outputs["num_cached_tokens"])[0],
            ),
        )
    except (KeyError, struct.error, UnicodeDecodeError) as error:
        raise ServerError(f"the server sent a malformed response ({error!r})") from None


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


def _text(raw: bytes) -> str:
    """The first element of a BYTES tensor."""
    if not raw:
        return ""
    (length,) = _LENGTH.unpack_from(raw)
    return raw[4 : 4 + length].decode()


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
