"""What fails in UnifiedEngine, whom it concerns, and that nobody is left hanging."""

from __future__ import annotations

import threading

import pytest
from engine_support import (
    WAIT,
    Gate,
    Recorder,
    alone,
    assert_baseline,
    make_engine,
    request,
    wait_until,
)

from pocket_backend.api import (
    BackendUnavailableError,
    DeadlineExceededError,
    EngineError,
)
from pocket_backend.executors.fake import FakeOptions


def test_a_failing_request_raises_its_error_in_generate() -> None:
    engine, executor = make_engine()
    executor.faults.failing_requests.add("bad")
    with engine:
        iterator = engine.generate([1, 2], request_id="bad")
        with pytest.raises(EngineError, match="told to fail"):
            list(iterator)
        assert len(list(engine.generate([1, 2], 3))) == 4
        assert engine.health().ready
        assert_baseline(engine, executor)


def test_a_failing_step_fails_nobody_else() -> None:
    engine, executor = make_engine()

    def explode(requests) -> None:
        if any(asked.request_id == "bad" for asked in requests):
            raise MemoryError("out of memory")

    executor.faults.before_step = explode
    with engine:
        sinks = {name: Recorder() for name in ("a", "bad", "b")}
        for index, (name, sink) in enumerate(sinks.items()):
            engine.submit(request(name, (index + 1, 5), 20), sink)
        assert isinstance(sinks["bad"].wait().error, EngineError)
        for index, name in ((0, "a"), (2, "b")):
            assert sinks[name].wait().finish_reason == "length"
            expected = alone(request("x", (index + 1, 5), 20)).results()[0]
            assert sinks[name].token_ids == expected.token_ids
        assert engine.health().ready
        assert_baseline(engine, executor)


@pytest.mark.parametrize("how", ["unavailable", "failing"])
def test_a_dead_executor_fails_everything_and_refuses_more(how: str) -> None:
    engine, executor = make_engine(max_batch_size=2, failure_limit=3)
    with engine:
        sinks = [Recorder() for _ in range(8)]
        gate = Gate()
        executor.faults.before_step = gate
        for index, sink in enumerate(sinks):
            engine.submit(request(f"r{index}", (1, 2), None), sink)
        gate.wait_until_inside()
        if how == "unavailable":
            executor.faults.dead = True
        else:
            executor.faults.failing_steps = 1000
        gate.open.set()
        for sink in sinks:
            assert isinstance(sink.wait().error, EngineError | BackendUnavailableError)
        wait_until(lambda: engine.health().status == "dead")
        health = engine.health()
        assert not health.alive
        assert not health.ready
        assert health.message
        with pytest.raises(BackendUnavailableError, match="dead"):
            engine.submit(request("late", (1, 2)), Recorder())
        posted = threading.Event()
        assert engine.post(posted.set), "a dead engine still runs posted callables"
        assert posted.wait(WAIT)
    assert executor.closed


def test_a_broken_scheduler_kills_the_engine_and_hangs_nobody(monkeypatch) -> None:
    engine, _ = make_engine()
    with engine:
        scheduler = engine._stepper.scheduler

        def broken(*_args: object, **_kw: object) -> None:
            raise AssertionError("bug")

        monkeypatch.setattr(scheduler, "schedule", broken)
        monkeypatch.setattr(scheduler, "cancel", broken)
        sink = Recorder()
        engine.submit(request("a", (1, 2)), sink)
        assert isinstance(sink.wait().error, EngineError)
        wait_until(lambda: engine.health().status == "dead")


def test_deadline_ends_a_running_request() -> None:
    engine, executor = make_engine(FakeOptions(delay_seconds=0.002))
    with engine:
        with pytest.raises(DeadlineExceededError):
            list(engine.generate([1, 2], deadline_seconds=0.05))
        assert_baseline(engine, executor)
