"""The asynchronous client against the scripted upstream; what it shares with the other is there."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import grpc
import pytest
from fake_upstream import WAIT, WORDS, FakeUpstream, failing, two_then_wait, wait_first, words

from pocket_client import (
    AsyncClient,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    RetryPolicy,
    UnavailableError,
    Usage,
)

TEXT = "".join(WORDS)


def run(upstream: FakeUpstream, work: Callable[[AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with AsyncClient(upstream.address, timeout=WAIT) as client:
            await work(client)

    asyncio.run(main())


async def wait_for(upstream: FakeUpstream, condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(upstream.wait_for, condition, what)


def test_stream_completion_and_chat(upstream: FakeUpstream) -> None:
    async def work(client: AsyncClient) -> None:
        async with client.stream("two words") as stream:
            texts = [chunk.text async for chunk in stream]
        assert texts == list(WORDS)
        assert stream.completion.usage == Usage(2, 5, 1)
        assert (await client.generate("two words")).text == TEXT
        messages = [{"role": "user", "content": "x"}]
        assert (await client.chat(messages, max_tokens=1)).finish_reason == "length"
        assert [c.text async for c in client.chat_stream(messages, max_tokens=1)] == ["Hello"]
        assert await client.tokenize("abc") == (97, 98, 99)
        assert await client.detokenize([104, 105]) == "hi"
        assert await client.stats() == {"running": 0}

    run(upstream, work)


def test_errors_and_retries(upstream: FakeUpstream) -> None:
    def flaky(received: Any) -> Iterator[tuple[str, Any]]:
        if len(upstream.received) < 3:
            return iter([("error", "8 requests are waiting (max_queue 8); retry later")])
        return words(received)

    async def work(client: AsyncClient) -> None:
        upstream.script = flaky
        assert (await client.generate("x")).text == TEXT
        assert len(upstream.received) == 3
        upstream.script = failing(("error", "in ensemble 'pocketllm', top_p: got 2; no"))
        with pytest.raises(InvalidRequestError, match="top_p: got 2"):
            await client.generate("x")
        upstream.script = failing(
            ("chunk", ("a", (1,), "")), ("abort", (grpc.StatusCode.UNAVAILABLE, "crash"))
        )
        stream = client.stream("x")
        assert (await anext(stream)).text == "a"
        with pytest.raises(UnavailableError):
            await anext(stream)
        assert [chunk async for chunk in stream] == []

    run(upstream, work)
    assert len(upstream.received) == 5


def test_overload_is_reported_when_retries_run_out(upstream: FakeUpstream) -> None:
    upstream.script = failing(("error", "x requests are waiting; retry later"))

    async def main() -> None:
        retry = RetryPolicy(attempts=2, initial_seconds=0.01)
        async with AsyncClient(upstream.address, retry=retry) as client:
            with pytest.raises(OverloadedError):
                await client.generate("x")

    asyncio.run(main())
    assert len(upstream.received) == 2


async def leave_by_break(client: AsyncClient, _: FakeUpstream) -> None:
    async for _ in client.stream("x"):
        break
    gc.collect()


async def leave_by_aclose(client: AsyncClient, _: FakeUpstream) -> None:
    stream = client.stream("x")
    await anext(stream)
    await stream.aclose()
    assert [chunk async for chunk in stream] == []


async def leave_by_task(client: AsyncClient, _: FakeUpstream) -> None:
    """Cancelled while it waits for the third chunk."""
    two_came = asyncio.Event()

    async def read() -> None:
        stream = client.stream("x")
        await anext(stream)
        await anext(stream)
        two_came.set()  # the waiter gets its turn when this task waits again
        await anext(stream)

    task = asyncio.create_task(read())
    await two_came.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timeout(client: AsyncClient, upstream: FakeUpstream) -> None:
    """A timeout that runs out once the request has arrived."""

    async def run_out(limit: asyncio.Timeout) -> None:
        await wait_for(upstream, lambda: len(upstream.received) == 1, "arrival")
        limit.reschedule(asyncio.get_running_loop().time())

    async def ask() -> None:
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            group.create_task(run_out(limit))
            await client.generate("x")

    with pytest.raises(TimeoutError):
        await ask()


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_aclose, leave_by_task, leave_by_timeout]
)
def test_leaving_cancels(
    upstream: FakeUpstream, leave: Callable[[AsyncClient, FakeUpstream], Awaitable[None]]
) -> None:
    upstream.script = two_then_wait

    async def work(client: AsyncClient) -> None:
        await leave(client, upstream)
        (received,) = upstream.received
        await wait_for(upstream, received.over.is_set, "the RPC is cancelled")
        await wait_for(upstream, lambda: received.id in upstream.cancelled_ids, "cancelled by id")

    run(upstream, work)


def test_before_the_first_chunk_only_the_id_helps(upstream: FakeUpstream) -> None:
    upstream.script = wait_first

    async def work(client: AsyncClient) -> None:
        task = asyncio.create_task(client.generate("x", request_id="early"))
        await wait_for(upstream, lambda: len(upstream.received) == 1, "arrival")
        task.cancel()
        await wait_for(upstream, lambda: "early" in upstream.cancelled_ids, "cancelled by id")
        with pytest.raises(asyncio.CancelledError):
            await task

    run(upstream, work)


def test_closing_the_stream_wakes_its_reader(upstream: FakeUpstream) -> None:
    upstream.script = wait_first

    async def work(client: AsyncClient) -> None:
        stream = client.stream("x")
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)  # the reader's turn: it waits
        await stream.aclose()
        with pytest.raises(RequestCancelledError):
            await reader

    run(upstream, work)


def test_a_timeout_frees_the_server(upstream: FakeUpstream) -> None:
    upstream.script = wait_first

    async def work(client: AsyncClient) -> None:
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await client.generate("x", timeout=0.2, request_id="slow")
        assert 0.2 <= time.monotonic() - started < WAIT / 2
        await wait_for(upstream, lambda: "slow" in upstream.cancelled_ids, "cancelled by id")

    run(upstream, work)


def test_closing_the_client_is_bounded_and_final(upstream: FakeUpstream) -> None:
    upstream.script = wait_first

    async def main() -> None:
        client = AsyncClient(upstream.address)
        streams = [client.stream("x") for _ in range(8)]
        await wait_for(upstream, lambda: len(upstream.received) == 8, "arrival")
        for stream in streams:
            await stream.aclose()
        started = time.monotonic()
        await client.aclose()
        assert time.monotonic() - started < WAIT / 2  # nobody released the requests
        with pytest.raises(UnavailableError, match="closed"):
            await client.generate("x")

    asyncio.run(main())
    assert {received.id for received in upstream.received} <= set(upstream.cancelled_ids)


def test_t11_one_channel_carries_many_streams(upstream: FakeUpstream) -> None:
    upstream.script = two_then_wait

    async def work(client: AsyncClient) -> None:
        streams = [client.stream("x") for _ in range(50)]
        firsts = await asyncio.gather(*(anext(stream) for stream in streams))
        assert [chunk.text for chunk in firsts] == ["one"] * 50
        assert len(upstream.connections) == 1
        for stream in streams[:25]:
            await stream.aclose()
        upstream.release()
        for stream in streams[25:]:
            assert "".join([chunk.text async for chunk in stream]) == " two end"

    run(upstream, work)
