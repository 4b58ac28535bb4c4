"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from pocket_client.cancelling import (
    CALL_SECONDS,
    DRAIN_SECONDS,
    cancel_message,
    cancelled_count,
    ends_alone,
    read_control,
    waits,
)
from pocket_client.errors import PocketClientError, RequestCancelledError, ServerError
from pocket_client.options import (
    DETOKENIZER,
    GENERATOR,
    TOKENIZER,
    GenerationOptions,
    GenerationRequest,
    chat_request,
    text_request,
)
from pocket_client.results import Chunk, Collector, Completion
from pocket_client.retry import Attempts, RetryPolicy
from pocket_client.text_models import detokenize_inputs, ids_output, text_output, tokenize_inputs
from pocket_client.transport import AsyncChunkStream, AsyncTransport, parse_address


class AsyncClient:
    """A server's models, for the tasks of one event loop. Streams share one gRPC channel.

    As ``Client``; besides leaving the loop and ``aclose``, cancelling the task that waits cancels
    the request on the server.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        timeout: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """As ``Client``."""
        parsed = parse_address(address)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._transport: AsyncTransport
        if parsed.scheme == "grpc":
            from pocket_client.grpc_async import AsyncGrpcTransport

            self._transport = AsyncGrpcTransport(parsed)
        else:
            from pocket_client.http_async import AsyncHttpTransport

            self._transport = AsyncHttpTransport(parsed)
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """Continue ``prompt`` (text, used as it is, or token ids) and wait for all of it."""
        request = text_request(
            prompt, options, stream=False, request_id=request_id, headers=headers
        )
        return await self._complete(request, timeout)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Continue ``prompt`` and yield chunks as they are made."""
        request = text_request(prompt, options, stream=True, request_id=request_id, headers=headers)
        return self.send(request, timeout=timeout)

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """Answer a conversation: dictionaries with ``role`` and ``content``."""
        request = chat_request(
            messages,
            options,
            stream=False,
            request_id=request_id,
            headers=headers,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return await self._complete(request, timeout)

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Answer a conversation in chunks."""
        request = chat_request(
            messages,
            options,
            stream=True,
            request_id=request_id,
            headers=headers,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.send(request, timeout=timeout)

    def send(self, request: GenerationRequest, *, timeout: float | None = None) -> AsyncStream:
        """Send a request that was built before. The answer to ``stream=False`` is one chunk."""
        wait = self._timeout if timeout is None else timeout
        return AsyncStream(self, request, Attempts(self._retry, wait))

    async def cancel(self, request_id: str) -> int:
        """End all requests of that id, whoever sent them; returns how many there were."""
        answer = await self._transport.call(
            GENERATOR, cancel_message(request_id), "control_result", CALL_SECONDS
        )
        return cancelled_count(answer)

    async def stats(self, *, timeout: float = 5.0) -> dict[str, object]:
        """The engine's counters, gauges and health."""
        message = {"control": '{"stats": true}'}
        return read_control(
            await self._transport.call(GENERATOR, message, "control_result", timeout)
        )

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Ids of a text, or of a conversation as the model would see it."""
        inputs = tokenize_inputs(prompt, add_generation_prompt)
        wait = self._timeout if timeout is None else timeout
        return ids_output(await self._transport.call(TOKENIZER, inputs, "input_ids", wait))

    async def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """Text of ids, special tokens left out."""
        inputs = detokenize_inputs(token_ids)
        wait = self._timeout if timeout is None else timeout
        return text_output(await self._transport.call(DETOKENIZER, inputs, "text_output", wait))

    async def aclose(self) -> None:
        """Cancel what is still under way (bounded) and close the channel. Idempotent."""
        self._closed = True
        if self._leaving:
            _, late = await asyncio.wait(self._leaving, timeout=CALL_SECONDS)
            for task in late:
                task.cancel()
        await self._transport.aclose()

    async def _complete(self, request: GenerationRequest, timeout: float | None) -> Completion:
        async with self.send(request, timeout=timeout) as stream:
            async for _ in stream:
                pass
            return stream.completion

    def _leave(self, chunks: AsyncChunkStream, cancel_id: str | None, *, received: bool) -> None:
        """Let go of a stream before its end, cancelling its request by ``cancel_id`` if given.

        In a task of our own: the caller's task may be the one that is cancelled.
        """
        must_drain = chunks.leave()
        if not must_drain and cancel_id is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a stream collected after its loop ended
            loop = None
        if loop is None or self._closed:
            chunks.cancel()
            return
        task = loop.create_task(self._end_abandoned(chunks, cancel_id, received, must_drain))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _end_abandoned(
        self, chunks: AsyncChunkStream, cancel_id: str | None, received: bool, must_drain: bool
    ) -> None:
        try:
            if cancel_id is not None:
                with contextlib.suppress(PocketClientError):
                    await self._cancel_until_found(cancel_id, received)
            if must_drain:
                await chunks.drain(DRAIN_SECONDS)
        except asyncio.CancelledError:
            chunks.cancel()
            raise

    async def _cancel_until_found(self, request_id: str, received: bool) -> None:
        if await self.cancel(request_id):
            return
        for wait in waits(received):
            await asyncio.sleep(wait)
            if await self.cancel(request_id):
                return


class AsyncStream(AsyncIterator[Chunk]):
    """The chunks of one request.

    Leaving the loop early, ``aclose``, cancelling the task that waits and garbage collection cancel
    it on the server, too.
    """

    def __init__(self, client: AsyncClient, request: GenerationRequest, attempts: Attempts) -> None:
        self._chunks: AsyncChunkStream | None = None
        self._ended = False
        self._client = client
        self._request = request
        self._attempts = attempts
        self._collector = Collector(request.request_id, request.outputs)
        self._completion: Completion | None = None
        self._chunks = client._transport.open(request, attempts.remaining())

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def completion(self) -> Completion:
        """All of it together, once the last chunk was read.

        Raises:
            ServerError: the stream has not been read to its end.
        """
        if self._completion is None:
            raise ServerError("the stream has not been read to its end")
        return self._completion

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        assert self._chunks is not None
        while True:
            try:
                chunk = await self._chunks.__anext__()
            except StopAsyncIteration:
                self._ended = True
                raise
            except PocketClientError as error:
                if self._ended:
                    raise _closed_meanwhile() from None
                await self._reopen_or_raise(error)
                continue
            except asyncio.CancelledError:
                self._end(cancel=True)
                raise
            if self._ended:
                raise _closed_meanwhile()
            self._attempts.received = True
            self._completion = self._collector.add(chunk)
            return chunk

    async def _reopen_or_raise(self, error: PocketClientError) -> None:
        wait = self._attempts.wait_after(error)
        if wait is None:
            self._end(cancel=not ends_alone(error))
            raise error
        if self._chunks is not None:
            self._client._leave(self._chunks, None, received=False)
        await asyncio.sleep(wait)
        if self._ended:
            raise _closed_meanwhile()
        try:
            self._chunks = self._client._transport.open(self._request, self._attempts.remaining())
        except PocketClientError:
            self._end(cancel=False)
            raise

    async def aclose(self) -> None:
        """Cancel the request unless it is finished. Idempotent, and does not wait."""
        self._end(cancel=self._completion is None)

    def _end(self, *, cancel: bool) -> None:
        if self._ended:
            return
        self._ended = True
        if self._chunks is not None:
            name = self.request_id if cancel else None
            self._client._leave(self._chunks, name, received=self._attempts.received)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end(cancel=self._completion is None)


def _closed_meanwhile() -> RequestCancelledError:
    """For a reader whose stream another task closed, whatever its read met because of that."""
    return RequestCancelledError("the request was cancelled")
