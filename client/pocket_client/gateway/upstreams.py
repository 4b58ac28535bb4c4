"""The model servers behind the gateway, as one client.

A request goes to the server that has its prefix (`affinity`), unless that one is loaded beyond its
share, unhealthy, or cut off (`breaker`). It is tried again elsewhere while nothing of its answer
has arrived. When every server looks bad, all are tried: a wrong guess about health must not refuse
requests that would have worked.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from pocket_client.aio import AsyncClient, AsyncStream
from pocket_client.errors import (
    DeadlineExceededError,
    OverloadedError,
    PocketClientError,
    ShuttingDownError,
    UnavailableError,
)
from pocket_client.gateway import affinity
from pocket_client.gateway.breaker import CircuitBreaker
from pocket_client.gateway.discovery import UpstreamNames, resolve
from pocket_client.gateway.metrics import Metrics
from pocket_client.options import GenerationRequest
from pocket_client.results import Chunk, Completion
from pocket_client.retry import Attempts, RetryPolicy

_log = logging.getLogger("pocket_client.gateway")
HEALTH_SECONDS = 5.0
HEALTH_TIMEOUT_SECONDS = 2.0
DNS_SECONDS = 10.0
_Result = TypeVar("_Result")
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class ChunkSource(Protocol):
    """A stream of chunks, wherever it comes from: what answering a request needs."""

    @property
    def completion(self) -> Completion: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Chunk: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    async def aclose(self) -> None: ...


class Upstream:
    """One server and what is known about it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client = AsyncClient(address, retry=RetryPolicy(attempts=1))
        self.breaker = CircuitBreaker()
        self.open = 0
        """Requests under way."""
        self.healthy = True
        """By the last check."""
        self.draining = False
        """No longer listed: it gets no new requests, and is closed when the last one ends."""

    def learn(self, error: PocketClientError | None, now: float) -> None:
        """From how a request went; None: an answer arrived."""
        if error is None or error.from_server:
            going = isinstance(error, ShuttingDownError)
            self.breaker.failed(now) if going else self.breaker.succeeded()
        elif isinstance(error, OverloadedError):
            self.breaker.succeeded()
        elif isinstance(error, UnavailableError):
            self.breaker.failed(now)
        else:
            self.breaker.gave_up()


class UpstreamPool:
    """Belongs to one event loop. ``start`` begins the health checks, ``aclose`` ends everything."""

    def __init__(
        self,
        names: UpstreamNames,
        metrics: Metrics,
        *,
        retry: RetryPolicy | None = None,
        resolver: Resolver = resolve,
        health_seconds: float = HEALTH_SECONDS,
        dns_seconds: float = DNS_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names
        self._metrics = metrics
        self._retry = retry or RetryPolicy()
        self._resolver = resolver
        self._health_seconds = health_seconds
        self._dns_seconds = dns_seconds
        self._clock = clock
        self._upstreams = {address: Upstream(address) for address in names.fixed}
        self._routes = affinity.PrefixRoutes()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def upstreams(self) -> list[Upstream]:
        """Those that may get requests."""
        return [upstream for upstream in self._upstreams.values() if not upstream.draining]

    async def start(self) -> None:
        """Resolve names; then keep checking. With one fixed server there is nothing to choose, and
        so nothing to check."""
        if self._names.resolved:
            await self._resolve_all()
            self._tasks.append(
                asyncio.create_task(self._every(self._dns_seconds, self._resolve_all))
            )
        if self._names.may_be_several:
            self._tasks.append(
                asyncio.create_task(self._every(self._health_seconds, self._check_all))
            )

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._closing, return_exceptions=True)
        await asyncio.gather(*(upstream.client.aclose() for upstream in self._upstreams.values()))

    def send(self, request: GenerationRequest, *, timeout: float | None = None) -> RoutedStream:
        """As ``AsyncClient.send``; nothing is sent before the first chunk is asked for."""
        return RoutedStream(self, request, Attempts(self._retry, timeout))

    async def generate(self, prompt: str, *, max_tokens: int, timeout: float) -> Completion:
        """One answer, from any server that gives one."""
        return await self._any(
            lambda client: client.generate(prompt, max_tokens=max_tokens, timeout=timeout)
        )

    async def tokenize(
        self, prompt: Any, *, add_generation_prompt: bool | None = None, timeout: float
    ) -> tuple[int, ...]:
        """As ``AsyncClient.tokenize``, from any server."""
        return await self._any(
            lambda client: client.tokenize(
                prompt, add_generation_prompt=add_generation_prompt, timeout=timeout
            )
        )

    async def detokenize(self, token_ids: Sequence[int], *, timeout: float) -> str:
        """As ``AsyncClient.detokenize``, from any server."""
        return await self._any(lambda client: client.detokenize(token_ids, timeout=timeout))

    def choose(self, key: bytes, tried: set[str]) -> Upstream:
        """The server for a prefix; one of ``tried`` only if there is no other.

        Raises:
            UnavailableError: no server is known at all.
        """
        now = self._clock()
        listed = self.upstreams
        if not listed:
            raise UnavailableError("no model server is known")
        good = {up.address for up in listed if up.healthy and up.breaker.allows(now)}
        self._routes.meet(good)
        fresh = [upstream for upstream in listed if upstream.address not in tried] or listed
        passing = [upstream for upstream in fresh if upstream.breaker.allows(now)]
        healthy = [upstream for upstream in passing if upstream.healthy]
        candidates = healthy or passing or fresh
        loads = {upstream.address: upstream.open for upstream in candidates}
        return self._upstreams[self._routes.choose(key, loads)]

    def took(self, upstream: Upstream) -> None:
        upstream.open += 1
        upstream.breaker.sent(self._clock())

    def gave_back(
        self, upstream: Upstream, error: PocketClientError | None, *, told: bool = True
    ) -> None:
        """A request ended there. ``told``: whether that says anything about the server."""
        upstream.open -= 1
        if told:
            upstream.learn(error, self._clock())
        else:
            upstream.breaker.gave_up()
        outcome = "left" if not told else "answered" if error is None else type(error).__name__
        self._metrics.upstream_requests.labels(upstream.address, outcome).inc()
        self._close_if_drained(upstream)

    def others(self, tried: set[str]) -> bool:
        return any(upstream.address not in tried for upstream in self.upstreams)

    async def _any(self, call: Callable[[AsyncClient], Coroutine[Any, Any, _Result]]) -> _Result:
        tried: set[str] = set()
        while True:
            upstream = self.choose(b"", tried)
            tried.add(upstream.address)
            problem: PocketClientError | None = None
            told = False
            self.took(upstream)
            try:
                result = await call(upstream.client)
                told = True
            except PocketClientError as error:
                problem, told = error, True
                if not isinstance(error, UnavailableError) or not self.others(tried):
                    raise
            else:
                return result
            finally:
                self.gave_back(upstream, problem, told=told)

    # --- what runs beside the requests ------------------------------------------------------------

    async def _every(self, seconds: float, check: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await check()
            except Exception:  # noqa: BLE001  (checking goes on, whatever one round did)
                _log.exception("checking the model servers failed; it is tried again")

    async def _check_all(self) -> None:
        await asyncio.gather(*(self._check(upstream) for upstream in self.upstreams))

    async def _check(self, upstream: Upstream) -> None:
        """By the generator's own word: Triton stays ready when the process behind a model died."""
        try:
            stats = await upstream.client.stats(timeout=HEALTH_TIMEOUT_SECONDS)
            health = stats.get("health")
            healthy = not isinstance(health, dict) or health.get("ready") is not False
        except OverloadedError:
            healthy = True
        except PocketClientError:
            healthy = False
        if healthy != upstream.healthy:
            _log.warning("%s is %s", upstream.address, "back" if healthy else "not healthy")
        upstream.healthy = healthy
        self._metrics.upstream_healthy.labels(upstream.address).set(healthy)

    async def _resolve_all(self) -> None:
        """Take in new addresses, drain those that are gone; a name that fails keeps its own."""
        listed = set(self._names.fixed)
        for host, port in self._names.resolved:
            try:
                listed.update(await self._resolver(host, port))
            except OSError as error:
                _log.warning("%s does not resolve (%s); its addresses stay", host, error)
                return
        for address in sorted(listed - self._upstreams.keys()):
            self._upstreams[address] = Upstream(address)
        for upstream in list(self._upstreams.values()):
            upstream.draining = upstream.address not in listed
            self._close_if_drained(upstream)

    def _close_if_drained(self, upstream: Upstream) -> None:
        if upstream.draining and not upstream.open:
            if self._upstreams.pop(upstream.address, None) is None:
                return
            task = asyncio.create_task(upstream.client.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class RoutedStream(AsyncIterator[Chunk]):
    """One request's chunks, from whichever server answers. As ``AsyncStream`` otherwise."""

    def __init__(self, pool: UpstreamPool, request: GenerationRequest, attempts: Attempts) -> None:
        self._pool = pool
        self._request = request
        self._attempts = attempts
        self._key = affinity.prefix_key(request)
        self._tried: set[str] = set()
        self._sent = 0
        self._upstream: Upstream | None = None
        self._stream: AsyncStream | None = None
        self._completion: Completion | None = None
        self._ended = False

    @property
    def completion(self) -> Completion:
        """All of it together, once the last chunk was read."""
        assert self._completion is not None, "the stream has not been read to its end"
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
        while not self._ended:
            try:
                stream = self._stream or self._open()
                chunk = await stream.__anext__()
            except StopAsyncIteration:
                assert self._stream is not None
                self._completion = self._stream.completion
                self._end(None)
                break
            except PocketClientError as error:
                await self._failed(error)
                continue
            except BaseException:  # the reader's task is cancelled; the stream cancels itself
                self._end(None, told=False)
                raise
            self._attempts.received = True
            return chunk
        raise StopAsyncIteration

    def _open(self) -> AsyncStream:
        remaining = self._attempts.remaining()
        self._upstream = self._pool.choose(self._key, self._tried)
        self._tried.add(self._upstream.address)
        self._pool.took(self._upstream)
        self._stream = self._upstream.client.send(self._next_request(), timeout=remaining)
        return self._stream

    def _next_request(self) -> GenerationRequest:
        """Each attempt has an id of its own: one that broke off may still run, and is cancelled by
        its id, which must not reach the next attempt on the same server."""
        self._sent += 1
        if self._sent == 1:
            return self._request
        name = f"{self._request.request_id}.{self._sent}"
        return dataclasses.replace(self._request, request_id=name)

    async def _failed(self, error: PocketClientError) -> None:
        """Let go of this server, and return if another attempt should be made."""
        self._give_back(error, told=not isinstance(error, DeadlineExceededError))
        wait = self._attempts.wait_after(error)
        if wait is None:
            self._ended = True
            raise error
        if not self._pool.others(self._tried):
            self._tried.clear()
            await asyncio.sleep(wait)

    async def aclose(self) -> None:
        """Cancel the request unless it is finished. Idempotent, and does not wait."""
        if self._stream is not None:
            await self._stream.aclose()
        self._end(None, told=False)

    def _end(self, error: PocketClientError | None, *, told: bool = True) -> None:
        if not self._ended:
            self._ended = True
            self._give_back(error, told=told)

    def _give_back(self, error: PocketClientError | None, *, told: bool) -> None:
        upstream, self._upstream, self._stream = self._upstream, None, None
        if upstream is not None:
            self._pool.gave_back(upstream, error, told=told or self._attempts.received)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._end(None, told=False)
