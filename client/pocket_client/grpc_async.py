"""gRPC for asyncio: one channel, one RPC for each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from pocket_client.errors import RequestCancelledError, ServerError, UnavailableError
from pocket_client.options import GenerationRequest
from pocket_client.results import Chunk
from pocket_client.transport import DEADLINE_GRACE, Address, OutputValue, TensorValue
from pocket_client.wire_grpc import (
    CHANNEL_OPTIONS,
    call_message,
    ended_early,
    generation_message,
    read_chunk,
    read_output,
    rpc_error,
)


class AsyncGrpcTransport:
    """Implements ``AsyncTransport``. The channel is made on first use, inside the event loop."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._channel: Any = None
        self._stub: Any = None

    def open(self, request: GenerationRequest, timeout: float | None) -> AsyncGrpcChunkStream:
        message = generation_message(request, timeout)
        return AsyncGrpcChunkStream(request, self._start(message, timeout, request.headers))

    async def call(
        self, model: str, inputs: Mapping[str, TensorValue], output: str, timeout: float | None
    ) -> OutputValue:
        responses = self._start(call_message(model, inputs, output), timeout, ())
        found: OutputValue | None = None
        try:
            while (response := await responses.read()) is not grpc.aio.EOF:
                value = read_output(response, output)
                found = value if found is None else found
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error) from None
        finally:
            responses.cancel()
        if found is None:
            raise ServerError(f"model {model} sent no response")
        return found

    async def aclose(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _start(
        self, message: Any, timeout: float | None, headers: tuple[tuple[str, str], ...]
    ) -> Any:
        if self._channel is None:
            self._channel = self._connect()
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        deadline = None if timeout is None else timeout + DEADLINE_GRACE
        try:
            return self._stub.ModelStreamInfer(_once(message), timeout=deadline, metadata=headers)
        except grpc.aio.UsageError as error:
            raise UnavailableError(f"the client is closed: {error}") from None

    def _connect(self) -> Any:
        target = self._address.target
        if self._address.tls:
            credentials = grpc.ssl_channel_credentials()
            return grpc.aio.secure_channel(target, credentials, CHANNEL_OPTIONS)
        return grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)


class AsyncGrpcChunkStream:
    def __init__(self, request: GenerationRequest, responses: Any) -> None:
        self._request = request
        self._responses = responses
        self._finished = False
        self._cancelled = False

    async def __anext__(self) -> Chunk:
        try:
            while (response := await self._responses.read()) is not grpc.aio.EOF:
                chunk = read_chunk(response, self._request)
                if chunk is not None:
                    self._finished = chunk.finish_reason is not None
                    return chunk
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error) from None
        except asyncio.CancelledError:
            # grpc.aio raises it, too, for a call that `cancel` ended, whoever is waiting.
            if self._cancelled and not _being_cancelled():
                raise RequestCancelledError("the request was cancelled") from None
            raise
        if not self._finished:
            raise ended_early()
        raise StopAsyncIteration

    def cancel(self) -> None:
        self._cancelled = True
        self._responses.cancel()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message
