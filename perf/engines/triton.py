"""Ours through Triton: starts a server, and is the client of its gRPC streams.

Run as a worker (``python -m perf.engines.triton``), so that the client has an interpreter of its
own.  Client and server share the CPUs, so the client does as little as it can while it is timed:
one event loop, one channel, and responses are kept as they come and read afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2_grpc

import pocket_backend
from perf.engines.base import (
    BatchResult,
    EngineFailure,
    EngineOptions,
    Prompts,
    RequestTimes,
    check_result,
)
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.liveness import find_processes, sample_process
from pocket_backend.triton.ports import Ports
from pocket_client.errors import PocketClientError
from pocket_client.options import GenerationRequest, text_request
from pocket_client.wire_grpc import CHANNEL_OPTIONS, generation_message, read_chunks

CLIENT = "client"
RUN_TIMEOUT_SECONDS = 280.0
STOP_TIMEOUT_SECONDS = 3.0

Arrivals = Sequence[tuple[float, Any]]
"""Seconds since the batch was sent, and the ``ModelStreamInferResponse`` that came then."""


class TritonEngine:
    """See ``Engine``; prompts go through the ensemble as ``input_ids``, a stream for each.

    Owns the server.  ``cpu_seconds`` of its results has the client, ``tritonserver`` and the models
    ``tokenizer``, ``generator`` and ``detokenizer``.
    """

    def __init__(self, name: str = "triton") -> None:
        self.name = name
        self._server: TritonServer | None = None
        self._runner = asyncio.Runner()
        self._channel: Any = None

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        began = time.perf_counter()
        server = TritonServer(
            ServerOptions(
                options.model,
                ports=Ports(0, 0, 0),
                environment=server_environment(options),
                stop_timeout=STOP_TIMEOUT_SECONDS,
            )
        )
        server.start()
        self._server = server
        return {
            "version": pocket_backend.__version__,
            "weights": "the GGUF",
            "load_seconds": time.perf_counter() - began,
        }

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        server = self._server
        if server is None:
            raise EngineFailure(f"{self.name}: not started")
        requests = [greedy_request(prompt, max_new_tokens) for prompt in prompts]
        pids = find_processes(server.server_id)
        before = _cpu_seconds(pids)
        streams = self._runner.run(self._stream_all(server.grpc_address, requests))
        after = _cpu_seconds(pids)
        times = tuple(
            request_times(arrivals, request)
            for arrivals, request in zip(streams, requests, strict=True)
        )
        wall = max(request.finished_seconds for request in times)
        used = {name: after[name] - before[name] for name in before}
        return check_result(self.name, BatchResult(times, wall, used), len(prompts), max_new_tokens)

    def close(self) -> None:
        if self._channel is not None:
            self._runner.run(self._channel.close())
            self._channel = None
        self._runner.close()
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    async def _stream_all(
        self, address: str, requests: Sequence[GenerationRequest]
    ) -> list[Arrivals]:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        messages = [generation_message(request, None) for request in requests]
        began = time.perf_counter()
        async with asyncio.timeout(RUN_TIMEOUT_SECONDS), asyncio.TaskGroup() as group:
            tasks = [group.create_task(_arrivals(stub, message, began)) for message in messages]
        return [task.result() for task in tasks]


async def _arrivals(stub: Any, message: Any, began: float) -> Arrivals:
    """One request on an RPC of its own, to the end of the stream."""
    call = stub.ModelStreamInfer(_once(message))
    arrived = []
    while (response := await call.read()) is not grpc.aio.EOF:
        arrived.append((time.perf_counter() - began, response))
    return arrived


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message


def server_environment(options: EngineOptions) -> dict[str, str]:
    """``options`` as the generator reads them: what ``PocketLLMEngine`` gives to its engine."""
    settings = {
        "THREADS": options.threads,
        "MAX_BATCH_SIZE": options.max_sequences,
        "MAX_MODEL_LEN": options.max_model_len,
        "KV_CACHE_TOKENS": options.kv_cache_tokens,
        "ENABLE_PREFIX_CACHING": str(options.prefix_caching).lower(),
        **{name.upper(): value for name, value in options.extra.items()},
    }
    return {f"POCKETLLM_{name}": str(value) for name, value in settings.items()}


def greedy_request(prompt: Sequence[int], max_new_tokens: int) -> GenerationRequest:
    """Continues ``prompt`` by exactly ``max_new_tokens``, streamed."""
    options = {"max_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
    return text_request(prompt, options, stream=True)


def request_times(arrivals: Arrivals, request: GenerationRequest) -> RequestTimes:
    """What came for ``request``, and when: its first token and the chunk that ended it.

    Raises:
        EngineFailure: the server sent an error, or the stream ended before the last chunk.
    """
    tokens: list[int] = []
    first: float | None = None
    for seconds, response in arrivals:
        try:
            chunks = read_chunks(response, request)
        except PocketClientError as error:
            raise EngineFailure(f"triton: {error}") from error
        for chunk in chunks:
            tokens += chunk.token_ids
            if first is None and tokens:
                first = seconds
            if chunk.finish_reason is not None:
                return RequestTimes(tuple(tokens), seconds, first)
    raise EngineFailure(f"triton: a stream ended after {len(tokens)} tokens without its last chunk")


def _cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """Of this process and of the server's, since each began; of one that has ended: 0."""
    samples = {name: sample_process(pid) for name, pid in pids.items()}
    used = {name: sample.cpu_seconds if sample else 0.0 for name, sample in samples.items()}
    return {CLIENT: time.process_time(), **used}


if __name__ == "__main__":
    from perf.engines.worker import main

    main(TritonEngine)
