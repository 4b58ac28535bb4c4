"""A Triton server without Triton for ``perf.gateway_crowd``: chunks by the clock, one event loop.

``python -m perf.scripted_upstream`` prints its port and serves until its standard input ends. A
request with ``seed`` 0 gets one chunk and then nothing until it is cancelled; any other one gets
``max_tokens`` chunks, one every 50 ms.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

IDLE_SEED = 0
_PERIOD = 0.05
WORD = " word"


class ScriptedUpstream(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The stream endpoint of Triton's protocol, for the ensemble and cancelling."""

    def __init__(self) -> None:
        self._cancelled: dict[str, asyncio.Event] = {}

    async def ModelStreamInfer(  # noqa: N802  (the protocol's name)
        self, requests: AsyncIterator[Any], _context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Any]:
        async for request in requests:
            if request.model_name != "pocketllm":
                yield self._control(request)
                continue
            cancelled = self._cancelled.setdefault(request.id, asyncio.Event())
            try:
                async for answer in _answer(_parameters(request), cancelled):
                    yield answer
            finally:
                del self._cancelled[request.id]

    def _control(self, request: Any) -> Any:
        control = json.loads(_texts(request)["control"])
        found = self._cancelled.get(control.get("cancel_request_id", ""))
        if found is not None:
            found.set()
        result = json.dumps({"cancelled": int(found is not None)})
        return _response([("control_result", "BYTES", _bytes(result))])


async def _answer(parameters: dict[str, Any], cancelled: asyncio.Event) -> AsyncIterator[Any]:
    idle = parameters.get("seed") == IDLE_SEED
    count = 1 if idle else parameters["max_tokens"]
    for number in range(1, count + 1):
        last = number == count and not idle
        yield _chunk(number, "length" if last else "")
        if not last and not idle:
            await asyncio.sleep(_PERIOD)
    if idle:
        await cancelled.wait()
        response = service_pb2.ModelStreamInferResponse()
        response.error_message = "in ensemble 'pocketllm': cancelled"
        yield response


def _chunk(number: int, reason: str) -> Any:
    return _response(
        [
            ("num_cached_tokens", "UINT32", struct.pack("<I", 0)),
            ("num_input_tokens", "UINT32", struct.pack("<I", 4)),
            ("stop_reason", "BYTES", _bytes("")),
            ("finish_reason", "BYTES", _bytes(reason)),
            ("num_output_tokens", "UINT32", struct.pack("<I", number)),
            ("token_ids", "INT32", struct.pack("<i", number)),
            ("text_output", "BYTES", _bytes(WORD)),
            ("sequence_index", "INT32", struct.pack("<i", 0)),
        ]
    )


def _response(outputs: list[tuple[str, str, bytes]]) -> Any:
    response = service_pb2.ModelStreamInferResponse()
    for name, kind, raw in outputs:
        response.infer_response.outputs.add(name=name, datatype=kind, shape=[1])
        response.infer_response.raw_output_contents.append(raw)
    return response


def _bytes(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _texts(request: Any) -> dict[str, str]:
    pairs = zip(request.inputs, request.raw_input_contents, strict=True)
    return {tensor.name: raw[4:].decode() for tensor, raw in pairs if tensor.datatype == "BYTES"}


def _parameters(request: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = json.loads(_texts(request)["sampling_parameters"])
    return parameters


async def main() -> None:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(ScriptedUpstream(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main())
