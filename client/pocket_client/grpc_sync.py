"""gRPC for ordinary threads: one channel, one RPC for each request."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from pocket_client.errors import PocketClientError, ServerError, UnavailableError
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


class GrpcTransport:
    """Implements ``Transport``."""

    def __init__(self, address: Address) -> None:
        if address.tls:
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.secure_channel(address.target, credentials, CHANNEL_OPTIONS)
        else:
            self._channel = grpc.insecure_channel(address.target, CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def open(self, request: GenerationRequest, timeout: float | None) -> GrpcChunkStream:
        message = generation_message(request, timeout)
        return GrpcChunkStream(request, self._start(message, timeout, request.headers))

    def call(
        self, model: str, inputs: Mapping[str, TensorValue], output: str, timeout: float | None
    ) -> OutputValue:
        responses = self._start(call_message(model, inputs, output), timeout, ())
        found: OutputValue | None = None
        problem: PocketClientError | None = None
        try:
            for response in responses:  # to the end, also after an error: see ChunkStream
                try:
                    value = read_output(response, output)
                    found = value if found is None else found
                except PocketClientError as error:
                    problem = error
        except grpc.RpcError as error:
            raise rpc_error(error) from None
        if problem is not None:
            raise problem
        if found is None:
            raise ServerError(f"model {model} sent no response")
        return found

    def close(self) -> None:
        self._channel.close()

    def _start(
        self, message: Any, timeout: float | None, headers: tuple[tuple[str, str], ...]
    ) -> Any:
        deadline = None if timeout is None else timeout + DEADLINE_GRACE
        try:
            return self._stub.ModelStreamInfer(iter((message,)), timeout=deadline, metadata=headers)
        except ValueError as error:  # "Cannot invoke RPC on closed channel!"
            raise UnavailableError(f"the client is closed: {error}") from None


class GrpcChunkStream:
    def __init__(self, request: GenerationRequest, responses: Any) -> None:
        self._request = request
        self._responses = responses
        self._arrivals = Arrivals(request.outputs)
        self._over = False
        """The RPC has ended."""

    def __next__(self) -> Chunk:
        if (chunk := self._arrivals.take()) is not None:
            return chunk
        try:
            for response in self._responses:
                self._arrivals.add(read_chunks(response, self._request))
                if (chunk := self._arrivals.take()) is not None:
                    return chunk
        except grpc.RpcError as error:
            self._over = True
            raise rpc_error(error) from None
        self._over = True
        if not self._arrivals.finished:
            raise ended_early()
        raise StopIteration

    def leave(self) -> bool:
        return not self._over

    def drain(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._responses.cancel)
        timer.start()
        try:
            for _ in self._responses:
                pass
        except grpc.RpcError:
            pass
        finally:
            timer.cancel()
        self._over = True

    def cancel(self) -> None:
        self._responses.cancel()
