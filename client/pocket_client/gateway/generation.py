"""Runs one generation and answers it: JSON, or events as they come.

The client's disconnect is watched from the first moment on, streaming or not: it cancels the
upstream requests, which frees their slots.

A generation gives its place back before the last bytes of its answer go out, so whoever has read an
answer to its end can ask again at once, however few places there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pocket_client.errors import DeadlineExceededError, PocketClientError, RequestCancelledError
from pocket_client.gateway.auth import Tenant
from pocket_client.gateway.errors import ApiError, from_upstream
from pocket_client.gateway.fair_queue import Turn
from pocket_client.gateway.merging import merge
from pocket_client.gateway.rate_limit import Grant
from pocket_client.gateway.registry import Running
from pocket_client.gateway.render import EventWriter, answer, event
from pocket_client.gateway.service import Service
from pocket_client.gateway.translate import Generation
from pocket_client.gateway.upstreams import RoutedStream
from pocket_client.gateway.usage import UsageSum, expected_tokens
from pocket_client.results import Chunk, Completion

_log = logging.getLogger("pocket_client.gateway")
CLIENT_GONE = 499
STALL_SECONDS = 30.0
"""How long beyond a request's timeout a client may take to read what is left of its answer."""


class ChunkWriter(Protocol):
    """Turns the chunks of one streamed answer into events."""

    def chunk(self, prompt: int, chunk: Chunk) -> bytes:
        """The events of one chunk of a prompt's stream; may be empty."""

    def end(self) -> bytes:
        """What follows the last chunk of the last choice."""


class GenerationResponse(Response):
    """An ASGI response; everything happens when it is called."""

    def __init__(self, service: Service, generation: Generation, tenant: Tenant) -> None:
        super().__init__()
        self._service = service
        self._generation = generation
        self._tenant = tenant
        self._started = False
        """Whether the headers of a stream were sent."""
        self._place: Running | None = None
        """What this generation occupies, while it does."""
        self._turn: Turn | None = None
        """Its place among those that run upstream."""
        self._used = UsageSum()
        self._grant = Grant(None, 0)

    def whole(self, completions: Sequence[Completion]) -> bytes:
        """The body of an answer that does not stream."""
        return answer(self._generation, self._service.settings.model_name, completions)

    def writer(self) -> ChunkWriter:
        return EventWriter(self._generation, self._service.settings.model_name)

    def error_events(self, problem: ApiError) -> bytes:
        """What a stream that has begun gets when it fails."""
        return event(problem.body())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        ids = (self._generation.id, state["request_id"])
        try:
            self._grant = self._admit(state)
            with self._service.registry.entered(self._tenant, ids) as running:
                self._place = running
                self._service.metrics.in_flight.inc()
                try:
                    ended = await self._race(receive, send, running.cancelled)
                finally:
                    self._leave_place()
        except ApiError as error:
            self._settle(computed=False)
            await send_error(send, error)
            return
        if ended == "gone":
            self._settle(computed=self._turn is not None)
            state["status"] = CLIENT_GONE
            self._service.metrics.disconnects.inc()
        elif ended == "cancelled":
            await self._fail(send, RequestCancelledError("the request was cancelled"))

    def _admit(self, state: MutableMapping[str, Any]) -> Grant:
        """Raises ApiError (429). Either way the answer's headers say what is left."""
        limiter, tenant = self._service.rate_limiter, self._tenant.name
        try:
            tokens = expected_tokens(self._generation) if limiter.counts_tokens else 0
            return limiter.admit(tenant, tokens)
        finally:
            state["headers"] = limiter.headers(tenant)

    def _settle(self, *, computed: bool) -> None:
        """Charge what was seen. ``computed``: where nothing was seen, something may have been
        computed, so what was taken stays taken."""
        seen = self._used.total_tokens
        if seen or not computed:
            self._grant.settle(seen)

    def _leave_place(self) -> None:
        """Idempotent."""
        if self._turn is not None:
            self._turn.leave()
        if self._place is not None:
            self._place.leave()
            self._place = None
            self._service.metrics.in_flight.dec()

    async def _race(self, receive: Receive, send: Send, cancelled: asyncio.Future[None]) -> str:
        """``done``, ``gone`` (the client left, or reads no more) or ``cancelled``; nothing runs any
        more on return."""
        run = self._stream if self._generation.stream else self._answer
        work = asyncio.create_task(self._guarded(run, send))
        gone = asyncio.create_task(_disconnected(receive))
        tasks = (work, gone)
        try:
            limit = self._service.settings.request_timeout + STALL_SECONDS
            await asyncio.wait(
                (*tasks, cancelled), timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                return "done"
            return "cancelled" if cancelled.done() and not gone.done() else "gone"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, run: Callable[[Send], Awaitable[None]], send: Send) -> None:
        """Wait for a turn and take it. Whatever fails, the client gets an error and the end of its
        answer."""
        try:
            self._turn = await self._service.admission.turn(self._tenant.name)
            await run(send)
        except ApiError as error:
            self._settle(computed=False)
            self._leave_place()
            await send_error(send, error)
        except PocketClientError as error:
            await self._fail(send, error)
        except OSError:  # the client went away between two events
            self._settle(computed=True)
        except Exception as error:  # noqa: BLE001  (T16: every failure ends the answer)
            _log.exception("generation %s failed", self._generation.id)
            await self._fail(send, error)

    async def _fail(self, send: Send, error: Exception) -> None:
        if isinstance(error, PocketClientError):
            problem = from_upstream(error, self._generation.field_names)
        else:
            problem = ApiError(500, "internal error")
        self._settle(computed=isinstance(error, DeadlineExceededError | RequestCancelledError))
        self._leave_place()
        with contextlib.suppress(OSError):
            if self._started:
                self._service.metrics.stream_errors.inc()
                await _send_body(send, self.error_events(problem), more=False)
            else:
                await send_error(send, problem)

    async def _answer(self, send: Send) -> None:
        streams = self._open()
        async with contextlib.aclosing(merge(streams)) as chunks:
            await self._measured(chunks)
        completions = [stream.completion for stream in streams]
        self._count()
        body = self.whole(completions)
        self._leave_place()
        await _send_start(send, 200, b"application/json", len(body))
        await _send_body(send, body, more=False)

    async def _measured(self, chunks: AsyncGenerator[tuple[int, Chunk], None]) -> None:
        started, first = time.monotonic(), True
        async for index, chunk in chunks:
            self._used.add(index, chunk)
            if first:
                first = False
                self._first_chunk(started)

    async def _stream(self, send: Send) -> None:
        """Headers are sent with the first chunk, so that a refused request gets its status."""
        writer = self.writer()
        started = time.monotonic()
        async with contextlib.aclosing(merge(self._open())) as chunks:
            async for index, chunk in chunks:
                self._used.add(index, chunk)
                if not self._started:
                    self._first_chunk(started)
                    await _send_start(send, 200, b"text/event-stream; charset=utf-8")
                    self._started = True
                if data := writer.chunk(index, chunk):
                    await _send_body(send, data, more=True)
        self._count()
        self._leave_place()
        await _send_body(send, writer.end(), more=False)

    def _open(self) -> list[RoutedStream]:
        timeout = self._service.settings.request_timeout
        return [
            self._service.client.send(request, timeout=timeout)
            for request in self._generation.requests
        ]

    def _first_chunk(self, started: float) -> None:
        self._service.metrics.first_token_seconds.observe(time.monotonic() - started)
        self._service.readiness.answered()

    def _count(self) -> None:
        """What a finished generation used."""
        self._settle(computed=True)
        usages = self._used.by_prompt()
        metrics = self._service.metrics
        metrics.prompt_tokens.inc(sum(usage.prompt_tokens for usage in usages))
        metrics.completion_tokens.inc(sum(usage.completion_tokens for usage in usages))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_start(send: Send, status: int, kind: bytes, length: int | None = None) -> None:
    headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    else:
        headers.append((b"x-accel-buffering", b"no"))  # reverse proxies would hold events back
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_error(send: Send, error: ApiError) -> None:
    """A whole response with OpenAI's error object."""
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *((name.encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await _send_body(send, body, more=False)
