"""AsyncLLM: the same results from asyncio, and cancellation with the task."""

from __future__ import annotations

import asyncio
import gc

import pytest
from engine_support import SLOW, Gate, alone, assert_baseline, make_engine, request, wait_until

from pocket_backend.api import EngineError, InvalidRequestError, SamplingParams
from pocket_backend.engine.async_llm import AsyncLLM


def test_concurrent_generate() -> None:
    async def main() -> list[str]:
        async with AsyncLLM(model="fake") as llm:
            tasks = [llm.generate(f"p{i}", SamplingParams(max_tokens=9)) for i in range(8)]
            return [result.text for result in await asyncio.gather(*tasks)]

    expected = [
        alone(request("x", f"p{i}".encode(), 9), text=True).results()[0].text for i in range(8)
    ]
    assert asyncio.run(main()) == expected


def test_stream_and_chat() -> None:
    async def main() -> None:
        async with AsyncLLM(model="fake") as llm:
            params = SamplingParams(max_tokens=20)
            whole = await llm.generate("hello", params)
            events = [event async for event in llm.stream("hello", params)]
            assert "".join(event.text for event in events) == whole.text
            assert events[-1].last
            messages = [{"role": "user", "content": "hi"}]
            answer = await llm.chat(messages, params)
            parts = [event.text async for event in llm.chat_stream(messages, params)]
            assert "".join(parts) == answer.text

    asyncio.run(main())


def test_a_cancelled_task_cancels_its_request() -> None:
    engine, executor = make_engine(SLOW, text=True)

    async def main() -> None:
        llm = AsyncLLM(engine=engine)
        task = asyncio.create_task(llm.generate("hello"))
        while executor.steps < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with engine:
        asyncio.run(main())
        wait_until(lambda: engine.stats().requests["cancelled"] == 1)
        assert_baseline(engine, executor)


def test_leaving_a_stream_cancels_it() -> None:
    engine, executor = make_engine(SLOW, text=True)

    async def main() -> None:
        llm = AsyncLLM(engine=engine)
        async with llm.stream("hello") as stream:
            await anext(stream)
        async for _event in llm.stream("hello"):
            break
        gc.collect()
        third = llm.stream("hello")
        await anext(third)
        await third.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(third)

    with engine:
        asyncio.run(main())
        wait_until(lambda: engine.stats().requests["cancelled"] == 3)
        assert_baseline(engine, executor)


def test_a_closed_event_loop_cancels_what_it_left() -> None:
    engine, executor = make_engine(SLOW, text=True)
    kept = []

    async def main() -> None:
        kept.append(AsyncLLM(engine=engine).stream("hello"))
        await anext(kept[0])

    with engine:
        asyncio.run(main())
        wait_until(lambda: engine.stats().requests["cancelled"] == 1)
        assert_baseline(engine, executor)


def test_errors_reach_the_awaiter() -> None:
    engine, executor = make_engine(text=True)

    async def main() -> None:
        llm = AsyncLLM(engine=engine)
        with pytest.raises(InvalidRequestError):
            await llm.generate("")
        with pytest.raises(InvalidRequestError):
            llm.stream([10**6])
        with pytest.raises(EngineError, match="told to fail"):
            await llm.generate("a", request_id="bad")
        assert not llm.cancel("bad")
        assert llm.health().ready

    executor.faults.failing_requests.add("bad")
    with engine:
        asyncio.run(main())


def test_cancelling_the_task_that_waits_cancels_the_request_of_a_kept_stream() -> None:
    gate = Gate()
    engine, executor = make_engine(text=True)
    executor.faults.before_step = gate

    async def main() -> None:
        stream = AsyncLLM(engine=engine).stream("hello")
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()
        while engine.stats().requests["cancelled"] == 0:
            await asyncio.sleep(0.001)
        assert stream.request_id

    with engine:
        asyncio.run(main())
        assert_baseline(engine, executor)
