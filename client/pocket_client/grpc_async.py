"""gRPC for asyncio: one channel, one RPC for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from pocket_client.errors import (
    PocketClientError,
    RequestCancelledError,
    ServerError,
    UnavailableError,
)
from pocket_client.options import GenerationRequest
from pocket_client.results import Arrivals, Chunk
from pocket_client.transport import DEADLINE_GRACE, Address, OutputValue, TensorValue
from pocket_client.wire_grpc import (
    CHANNEL_OPTIONS,
    call_message,
    ended_early,
    generation_message,
    read_chunks,
    read_output,
    rpc_error,
)


class AsyncGrpcTransport:
    """Implements ``AsyncTransport``. The channel is made on first use, inside the event loop."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._channel: Any = None
        self._infer: Any = None

    def open(self, request: GenerationRequest, timeout: float | None) -> AsyncGrpcChunkStream:
        message = generation_message(request, timeout)
        return AsyncGrpcChunkStream(request, self._start(message, timeout, request.headers))

    async def call(
        self, model: str, inputs: Mapping[str, TensorValue], output: str, timeout: float | None
    ) -> OutputValue:
        responses = self._start(call_message(model, inputs, output), timeout, ())
        found: OutputValue | None = None
        problem: PocketClientError | None = None
        try:
            # To the end, also after an error: see ChunkStream.
            while (response := await responses.read()) is not grpc.aio.EOF:
                try:
                    value = read_output(response, output)
                    found = value if found is None else found
                except PocketClientError as error:
                    problem = error
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error) from None
        if problem is not None:
            raise problem
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
            self._infer = _one_request(self._channel)
        deadline = None if timeout is None else timeout + DEADLINE_GRACE
        try:
            return self._infer(message, timeout=deadline, metadata=headers)
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
        self._reading: asyncio.Task[Any] | None = None
        """The read under way. A task, since grpc.aio cancels the stream when a reader is cancelled,
        and since ``drain`` may meet a reader that still waits."""
        self._arrivals = Arrivals(request.outputs)
        self._over = False
        """The RPC has ended."""

    async def __anext__(self) -> Chunk:
        while (chunk := self._arrivals.take()) is None:
            response = await self._read()
            if response is grpc.aio.EOF:
                break
            self._arrivals.add(read_chunks(response, self._request))
        if chunk is not None:
            return chunk
        if not self._arrivals.finished:
            raise ended_early()
        raise StopAsyncIteration

    async def _read(self) -> Any:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._responses.read())
        reading = self._reading
        try:
            response = await asyncio.shield(reading)
        except grpc.aio.AioRpcError as error:
            self._over = True
            raise rpc_error(error) from None
        except asyncio.CancelledError:
            if not reading.cancelled():
                raise  # only this reader was cancelled
            self._over = True
            raise RequestCancelledError("the request was cancelled") from None
        if self._reading is reading:
            self._reading = None
        self._over = response is grpc.aio.EOF
        return response

    def leave(self) -> bool:
        return not self._over

    async def drain(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while await self._read() is not grpc.aio.EOF:
                    pass
        except (TimeoutError, PocketClientError):
            pass
        finally:
            if not self._over:
                self._responses.cancel()

    def cancel(self) -> None:
        self._responses.cancel()


def _one_request(channel: Any) -> Any:
    """``ModelStreamInfer`` for one request, which is all that we send on a stream.

    The same call on the wire; here headers, request and end leave in one batch, where a stream of
    requests waits between them.
    """
    return channel.unary_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )
