"""Small clients for the end-to-end tests: HTTP by the standard library, gRPC by tritonclient."""

from __future__ import annotations

import json
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import tritonclient.grpc as grpc

DTYPES = {"int": ("INT32", np.int32), "float": ("FP32", np.float32), "bool": ("BOOL", np.bool_)}
ANSWER_SECONDS = 300
"""A response that is lost never comes; on a machine that others use one may take a minute."""
UINT64_FIELDS = frozenset({"seed", "random_seed"})


@dataclass
class Reply:
    """Everything that one request brought back."""

    status: int = 200
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str = ""
    responses: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    counts: dict[int, int] = field(default_factory=dict)
    """Tokens of each output."""

    def add(self, body: Mapping[str, Any]) -> None:
        """One JSON response of the generate endpoints."""
        if "error" in body:
            self.error = body["error"]
            return
        self.responses += 1
        self.text += "".join(_items(body["text_output"]))
        self.token_ids += _items(body["token_ids"])
        self.finish_reason = _items(body["finish_reason"])[-1]
        self.stop_reason = _items(body["stop_reason"])[-1]
        self.num_input_tokens = body["num_input_tokens"]
        counts = _items(body["num_output_tokens"])
        self.counts.update(zip(_items(body["sequence_index"]), counts, strict=True))
        self.num_output_tokens = sum(self.counts.values())


def _items(value: Any) -> list[Any]:
    """Triton writes a vector of one element as a bare value."""
    return value if isinstance(value, list) else [value]


def post(
    url: str, body: Mapping[str, object] | bytes, timeout: float = ANSWER_SECONDS
) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def generate(base: str, body: Mapping[str, object] | bytes, model: str = "pocketllm") -> Reply:
    """`stream=false` through the generate endpoint."""
    status, data = post(f"{base}/v2/models/{model}/generate", body)
    reply = Reply(status)
    reply.add(json.loads(data))
    return reply


def generate_stream(base: str, body: Mapping[str, object]) -> Reply:
    """Server-sent events, read to the end."""
    status, data = post(f"{base}/v2/models/pocketllm/generate_stream", {"stream": True, **body})
    reply = Reply(status)
    for line in data.split(b"\n"):
        if line.startswith(b"data: "):
            reply.add(json.loads(line[6:]))
    return reply


def control(base: str, body: Mapping[str, object]) -> dict[str, Any]:
    """A message to the generator (statistics, cancellation)."""
    status, data = post(f"{base}/v2/models/generator/generate", {"control": json.dumps(body)})
    assert status == 200, data
    result: dict[str, Any] = json.loads(json.loads(data)["control_result"])
    return result


def at_baseline(stats: Mapping[str, Any]) -> bool:
    return (
        stats["running"] == stats["waiting"] == stats["open_streams"] == stats["blocks_used"] == 0
        and stats["slots_free"] == stats["slots_total"]
        and stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
        and stats["integrity_failures"] == 0
    )


def wait_for(condition: Callable[[], bool], timeout: float = 60.0, what: str = "") -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or condition}"
        time.sleep(0.02)


def infer_input(name: str, value: object) -> grpc.InferInput:
    """A tensor for a Python value, as a client of the documented fields would build it."""
    if isinstance(value, np.ndarray):
        array, kind = value, grpc.InferInput(name, list(value.shape), _triton_dtype(value.dtype))
        kind.set_data_from_numpy(array)
        return kind
    items = value if isinstance(value, list | tuple) else [value]
    sample = items[0] if items else ""
    if name in UINT64_FIELDS:
        dtype, array = "UINT64", np.array(items, dtype=np.uint64)
    elif isinstance(sample, str | bytes):
        encoded = [i if isinstance(i, bytes) else i.encode() for i in items]
        dtype, array = "BYTES", np.array(encoded, dtype=object)
    else:
        dtype, kind = DTYPES[type(sample).__name__]
        array = np.array(items, dtype=kind)
    made = grpc.InferInput(name, list(array.shape), dtype)
    made.set_data_from_numpy(array)
    return made


def _triton_dtype(dtype: np.dtype) -> str:
    return {"f": "FP", "i": "INT", "u": "UINT"}[dtype.kind] + str(dtype.itemsize * 8)


class GrpcStream:
    """One gRPC stream with one request, as a context manager; iterate to receive responses."""

    def __init__(
        self,
        address: str,
        fields: Mapping[str, object],
        *,
        model: str = "pocketllm",
        request_id: str = "",
        parameters: Mapping[str, object] | None = None,
    ) -> None:
        self._answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client = grpc.InferenceServerClient(address)
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))
        self._client.async_stream_infer(
            model,
            [infer_input(name, value) for name, value in fields.items()],
            request_id=request_id,
            parameters=dict(parameters or {}),
            enable_empty_final_response=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(cancel=False)

    def close(self, *, cancel: bool) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def __iter__(self) -> Iterator[Any]:
        """Results until the final one; an error is raised."""
        while True:
            result, error = self._answers.get(timeout=ANSWER_SECONDS)
            if error is not None:
                raise error
            if result.as_numpy("finish_reason") is not None:
                yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


def grpc_stream(address: str, fields: Mapping[str, object], **options: Any) -> Reply:
    """One request over gRPC streaming, read to the end."""
    reply = Reply()
    with GrpcStream(address, {"stream": True, **fields}, **options) as stream:
        try:
            for result in stream:
                reply.add(
                    {
                        "text_output": result.as_numpy("text_output")[0].decode(),
                        "token_ids": result.as_numpy("token_ids").tolist(),
                        "finish_reason": result.as_numpy("finish_reason")[0].decode(),
                        "stop_reason": result.as_numpy("stop_reason")[0].decode(),
                        "num_input_tokens": int(result.as_numpy("num_input_tokens")[0]),
                        "num_output_tokens": int(result.as_numpy("num_output_tokens")[0]),
                        "sequence_index": int(result.as_numpy("sequence_index")[0]),
                    }
                )
        except grpc.InferenceServerException as error:
            reply.error = error.message()
    return reply


def processes_mentioning(text: str) -> list[str]:
    """Command lines of live processes that hold ``text``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if text in words:
                found.append(words.replace("\0", " ")[:200])
    return found
