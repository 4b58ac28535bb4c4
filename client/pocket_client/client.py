"""The client for ordinary threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from pocket_client.transport import ChunkStream, Transport, parse_address


class Client:
    """A server's models, for any number of threads. Streams share one gRPC channel.

    Every call raises a ``PocketClientError``; ``TypeError`` and ``ValueError`` only for arguments
    that could not be sent at all.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        timeout: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """``address``: ``host:port`` for gRPC, or a URL with grpc, grpcs, http or https.

        ``timeout`` is the default of every call: seconds from the call to the end of its answer,
        retries included; None waits for ever.
        """
        parsed = parse_address(address)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._transport: Transport
        if parsed.scheme == "grpc":
            from pocket_client.grpc_sync import GrpcTransport

            self._transport = GrpcTransport(parsed)
        else:
            from pocket_client.http_sync import HttpTransport

            self._transport = HttpTransport(parsed)
        self._lock = threading.RLock()  # a stream may be collected while it is held
        self._leaving: ThreadPoolExecutor | None = None
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
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
        return self._complete(request, timeout)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        timeout: float | None = None,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Continue ``prompt`` and yield chunks as they are made."""
        request = text_request(prompt, options, stream=True, request_id=request_id, headers=headers)
        return self.send(request, timeout=timeout)

    def chat(
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
        return self._complete(request, timeout)

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
    ) -> Stream:
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

    def send(self, request: GenerationRequest, *, timeout: float | None = None) -> Stream:
        """Send a request that was built before. The answer to ``stream=False`` is one chunk."""
        return Stream(self, request, Attempts(self._retry, self._limit(timeout)))

    def cancel(self, request_id: str) -> int:
        """End all requests of that id, whoever sent them; returns how many there were."""
        answer = self._transport.call(
            GENERATOR, cancel_message(request_id), "control_result", CALL_SECONDS
        )
        return cancelled_count(answer)

    def stats(self, *, timeout: float = 5.0) -> dict[str, object]:
        """The engine's counters, gauges and health."""
        message = {"control": '{"stats": true}'}
        return read_control(
            self._transport.call(
                GENERATOR, message, "control_result", self._timeout if timeout is None else timeout
            )
        )

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Ids of a text, or of a conversation as the model would see it."""
        inputs = tokenize_inputs(prompt, add_generation_prompt)
        limit = self._limit(timeout)
        return ids_output(self._transport.call(TOKENIZER, inputs, "input_ids", limit))

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """Text of ids, special tokens left out."""
        inputs = detokenize_inputs(token_ids)
        limit = self._limit(timeout)
        return text_output(self._transport.call(DETOKENIZER, inputs, "text_output", limit))

    def close(self) -> None:
        """Cancel what is still under way (bounded) and close the channel. Idempotent."""
        with self._lock:
            self._closing.set()
            leaving = self._leaving
        if leaving is not None:
            leaving.shutdown(wait=True)
        self._transport.close()

    def _limit(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else timeout

    def _complete(self, request: GenerationRequest, timeout: float | None) -> Completion:
        with self.send(request, timeout=timeout) as stream:
            for _ in stream:
                pass
            return stream.completion

    def _leave(self, chunks: ChunkStream, cancel_id: str | None, *, received: bool) -> None:
        """Let go of a stream before its end, cancelling its request by ``cancel_id`` if given.

        On a thread of our own: callers only want to leave.
        """
        must_drain = chunks.leave()
        if not must_drain and cancel_id is None:
            return
        with self._lock:
            if self._closing.is_set():
                chunks.cancel()
                return
            if self._leaving is None:
                self._leaving = ThreadPoolExecutor(4, "pocket-client-leave")
            self._leaving.submit(self._end_abandoned, chunks, cancel_id, received, must_drain)

    def _end_abandoned(
        self, chunks: ChunkStream, cancel_id: str | None, received: bool, must_drain: bool
    ) -> None:
        if cancel_id is not None:
            with contextlib.suppress(PocketClientError):
                self._cancel_until_found(cancel_id, received)
        if must_drain:
            chunks.drain(DRAIN_SECONDS)

    def _cancel_until_found(self, request_id: str, received: bool) -> None:
        if self.cancel(request_id):
            return
        for wait in waits(received):
            last = self._closing.wait(wait)
            if self.cancel(request_id) or last:
                return


class Stream(Iterator[Chunk]):
    """The chunks of one request.

    Leaving the loop early, ``close`` and garbage collection cancel it on the server, too. One
    thread iterates; ``close`` may be called from any.
    """

    def __init__(self, client: Client, request: GenerationRequest, attempts: Attempts) -> None:
        self._chunks: ChunkStream | None = None
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        assert self._chunks is not None
        while True:
            try:
                chunk = next(self._chunks)
            except StopIteration:
                self._ended = True
                raise
            except PocketClientError as error:
                if self._ended:
                    raise _closed_meanwhile() from None
                self._reopen_or_raise(error)
                continue
            if self._ended:
                raise _closed_meanwhile()
            self._attempts.received = True
            self._completion = self._collector.add(chunk)
            return chunk

    def _reopen_or_raise(self, error: PocketClientError) -> None:
        wait = self._attempts.wait_after(error)
        if wait is None:
            self._end(cancel=not ends_alone(error))
            raise error
        if self._chunks is not None:
            self._client._leave(self._chunks, None, received=False)
        time.sleep(wait)
        if self._ended:
            raise _closed_meanwhile()
        try:
            self._chunks = self._client._transport.open(self._request, self._attempts.remaining())
        except PocketClientError:
            self._end(cancel=False)
            raise

    def close(self) -> None:
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
            self.close()


def _closed_meanwhile() -> RequestCancelledError:
    """For a reader whose stream another thread closed, whatever its read met because of that."""
    return RequestCancelledError("the request was cancelled")
