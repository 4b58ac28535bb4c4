"""Cancelling a request of UnifiedEngine in every state, and leaving its stream."""

from __future__ import annotations

import gc

import pytest
from engine_support import (
    SLOW,
    Gate,
    Recorder,
    assert_baseline,
    make_engine,
    request,
    wait_until,
)

from pocket_backend.executors.fake import FakeOptions


def test_cancel_while_queued() -> None:
    gate = Gate()
    engine, executor = make_engine(max_batch_size=1)
    executor.faults.before_step = gate
    with engine:
        running, queued = Recorder(), Recorder()
        engine.submit(request("run", (1, 2)), running)
        gate.wait_until_inside()
        handle = engine.submit(request("wait", (3, 4)), queued)
        assert handle.cancel()
        gate.open.set()
        last = queued.wait()
        assert (last.finish_reason, queued.token_ids) == ("cancelled", ())
        assert running.wait().finish_reason == "length"
        assert not handle.cancel()
        assert_baseline(engine, executor)


def test_cancel_in_the_inbox_right_after_submit() -> None:
    engine, executor = make_engine(SLOW)
    with engine:
        for index in range(50):
            sink = Recorder()
            assert engine.submit(request(f"r{index}", (1, 2), None), sink).cancel()
            assert sink.wait().finish_reason == "cancelled"
        assert_baseline(engine, executor)


def test_cancel_during_prefill_takes_effect_in_that_step() -> None:
    gate = Gate()
    engine, executor = make_engine(FakeOptions(max_batch_tokens=8))
    executor.faults.before_step = gate
    with engine:
        sink = Recorder()
        engine.submit(request("a", range(1, 41)), sink)
        gate.wait_until_inside()
        assert engine.cancel("a")
        gate.open.set()
        assert sink.wait().finish_reason == "cancelled"
        assert sink.token_ids == ()
        assert executor.steps == 1
        assert_baseline(engine, executor)


def test_cancel_while_decoding_and_after_the_end() -> None:
    engine, executor = make_engine(SLOW)
    with engine:
        stream = engine.stream(request("a", (1, 2), None))
        for _ in range(3):
            next(stream)
        assert stream.cancel()
        events = list(stream)
        assert events[-1].finish_reason == "cancelled"
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens < 4000
        assert not engine.cancel("a")
        assert not engine.cancel("never seen")
        assert_baseline(engine, executor)


def test_leaving_a_generate_loop_cancels() -> None:
    engine, executor = make_engine(SLOW)
    with engine:
        for event in engine.generate([1, 2, 3]):
            if event["type"] == "token":
                break
        del event
        wait_until(lambda: engine.stats().requests["cancelled"] == 1, "cancelled after break")
        iterator = engine.generate([4, 5])
        next(iterator)
        iterator.close()
        with pytest.raises(StopIteration):
            next(iterator)
        unread = engine.generate([6, 7])
        del unread
        gc.collect()
        wait_until(lambda: engine.stats().requests["cancelled"] == 3, "cancelled when dropped")
        assert_baseline(engine, executor)


def test_a_dropped_or_closed_stream_cancels() -> None:
    engine, executor = make_engine(SLOW)
    with engine:
        for event in engine.stream(request("a", (1, 2), None)):
            assert event.token_ids
            break
        with engine.stream(request("b", (1, 2), None)) as stream:
            next(stream)
        wait_until(lambda: engine.stats().requests["cancelled"] == 2)
        assert_baseline(engine, executor)


def test_stream_get_times_out_and_goes_on() -> None:
    gate = Gate()
    engine, executor = make_engine()
    executor.faults.before_step = gate
    with engine:
        stream = engine.stream(request("a", (1, 2), 2))
        gate.wait_until_inside()
        with pytest.raises(TimeoutError, match="'a'"):
            stream.get(timeout=0.01)
        gate.open.set()
        assert [event.last for event in stream] == [False, True]
        with pytest.raises(StopIteration):
            stream.get()
