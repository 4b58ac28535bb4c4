"""Doubles of Triton's `triton_python_backend_utils`, for tests that need no server.

They record what reaches the response senders and on which thread, and refuse what Triton refuses:
a response after the final flag, a second final flag.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

FINAL = 1


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError:
    (
        UNKNOWN,
        INTERNAL,
        NOT_FOUND,
        INVALID_ARG,
        UNAVAILABLE,
        UNSUPPORTED,
        ALREADY_EXISTS,
        CANCELLED,
    ) = range(8)

    def __init__(self, message: str, code: int = 1) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class TritonModelException(Exception):  # noqa: N818  (Triton's name)
    pass


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: Any = None) -> None:
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors or []}
        self.error = error

    def text(self, name: str) -> str:
        return self.tensors[name][0].decode()

    def ids(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].tolist())


class Sender:
    """Thread-safe record of one request's responses."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.threads: set[str] = set()
        self.finals = 0
        self.gone = False
        self.fail: Callable[[InferenceResponse | None], None] | None = None
        self.done = threading.Event()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        self.threads.add(threading.current_thread().name)
        if self.finals:
            raise RuntimeError("response after the final flag")
        if self.fail is not None:
            self.fail(response)
        if response is not None:
            self.responses.append(response)
        if flags & FINAL:
            self.finals += 1
            self.done.set()

    def is_cancelled(self) -> bool:
        self.threads.add(threading.current_thread().name)
        return self.gone

    def wait(self) -> list[InferenceResponse]:
        assert self.done.wait(60), "the sender was never ended"
        return self.responses

    @property
    def error(self) -> TritonError:
        (response,) = [r for r in self.wait() if r.error is not None]
        return response.error


class Request:
    def __init__(
        self,
        inputs: Mapping[str, np.ndarray],
        *,
        parameters: Mapping[str, object] | None = None,
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        cancelled: bool = False,
    ) -> None:
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self._parameters = json.dumps(dict(parameters or {}))
        self._id, self._outputs, self._cancelled = request_id, outputs, cancelled
        self.sender = Sender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return self._id

    def requested_output_names(self) -> tuple[str, ...]:
        return self._outputs

    def get_response_sender(self) -> Sender:
        return self.sender

    def is_cancelled(self) -> bool:
        return self._cancelled


def serialize_byte_tensor(array: np.ndarray) -> bytes:
    return b"".join(struct.pack("<I", len(item)) + item for item in array.reshape(-1))


def deserialize_bytes_tensor(data: bytes) -> np.ndarray:
    items, offset = [], 0
    while offset < len(data):
        (size,) = struct.unpack_from("<I", data, offset)
        items.append(data[offset + 4 : offset + 4 + size])
        offset += 4 + size
    return np.array(items, dtype=object)


def make_pb_utils(**extra: object) -> SimpleNamespace:
    return SimpleNamespace(
        Tensor=Tensor,
        TritonError=TritonError,
        TritonModelException=TritonModelException,
        InferenceResponse=InferenceResponse,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        serialize_byte_tensor=serialize_byte_tensor,
        deserialize_bytes_tensor=deserialize_bytes_tensor,
        **extra,
    )


def strings(*items: str | bytes) -> np.ndarray:
    return np.array([i if isinstance(i, bytes) else i.encode() for i in items], dtype=object)


def ints(*items: int) -> np.ndarray:
    return np.array(items, dtype=np.int32)


def model_args(**parameters: str) -> dict[str, str]:
    """Arguments of ``initialize`` with these config parameters."""
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return {"model_config": json.dumps(config), "model_name": "test"}
