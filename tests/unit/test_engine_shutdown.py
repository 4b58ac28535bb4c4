"""Closing, draining, dropping and forgetting a UnifiedEngine."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
from engine_support import (
    SLOW,
    WAIT,
    Gate,
    ManualClock,
    Recorder,
    engine_threads,
    make_engine,
    request,
    wait_until,
)

from pocket_backend.api import (
    OverloadedError,
)


def test_close_fails_open_requests_and_ends_the_threads() -> None:
    engine, executor = make_engine(SLOW, max_batch_size=2)
    sinks = [Recorder() for _ in range(5)]
    for index, sink in enumerate(sinks):
        engine.submit(request(f"r{index}", (1, 2), None), sink)
    stream = engine.stream(request("s", (1, 2), None))
    engine.close()
    for sink in sinks:
        assert isinstance(sink.wait().error, OverloadedError)
    assert isinstance(list(stream)[-1].error, OverloadedError)
    assert executor.closed
    wait_until(lambda: not engine_threads())
    assert engine.health().status == "stopped"
    with pytest.raises(OverloadedError):
        engine.submit(request("late", (1, 2)), Recorder())
    assert not engine.post(lambda: None)
    engine.close()  # idempotent


def test_close_drains_when_asked() -> None:
    gate = Gate()
    engine, executor = make_engine()
    executor.faults.before_step = gate
    sink = Recorder()
    engine.submit(request("a", (1, 2), 5), sink)
    gate.wait_until_inside()
    closer = threading.Thread(target=engine.close, args=(WAIT,))
    closer.start()
    wait_until(lambda: engine.health().status == "draining")
    with pytest.raises(OverloadedError, match="shutting down"):
        engine.submit(request("late", (1, 2)), Recorder())
    gate.open.set()
    assert sink.wait().finish_reason == "length"
    closer.join(WAIT)
    assert not closer.is_alive()
    assert executor.closed


def test_a_drain_ends_at_its_limit() -> None:
    clock = ManualClock()
    engine, _ = make_engine(SLOW, clock=clock)
    sink = Recorder()
    engine.submit(request("a", (1, 2), None), sink)
    closer = threading.Thread(target=engine.close, args=(5.0,))
    closer.start()
    wait_until(lambda: engine.health().status == "draining")
    seen = len(sink.events)
    wait_until(lambda: len(sink.events) > seen + 2, "it goes on while draining")
    clock.now += 6.0
    assert isinstance(sink.wait().error, OverloadedError)
    closer.join(WAIT)
    assert not closer.is_alive()


def test_an_idle_engine_closes_at_once_whatever_the_drain() -> None:
    engine, _ = make_engine()
    closer = threading.Thread(target=engine.close, args=(3600.0,))
    closer.start()
    closer.join(WAIT)
    assert not closer.is_alive()


def test_close_from_many_threads_and_from_the_engine_thread() -> None:
    engine, executor = make_engine()
    closers = [threading.Thread(target=engine.close) for _ in range(4)]
    engine.post(engine.close)
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(WAIT)
        assert not closer.is_alive()
    wait_until(lambda: executor.closed)


def test_a_dropped_engine_stops() -> None:
    engine, executor = make_engine()
    list(engine.generate([1, 2], 3))
    del engine
    gc.collect()
    wait_until(lambda: executor.closed, "closed by the collector")
    wait_until(lambda: not engine_threads())


def test_interpreter_exit_with_an_open_stream_is_clean() -> None:
    code = """
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.fake import FakeExecutor, FakeOptions
class Noisy(FakeExecutor):
    def close(self):
        super().close()
        print("closed", flush=True)
engine = UnifiedEngine(Noisy(FakeOptions(delay_seconds=0.01)))
print(next(engine.generate([1, 2, 3]))["type"], flush=True)
kept = engine.generate([1, 2, 3])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["token", "closed"]


def test_no_threads_are_left() -> None:
    gc.collect()
    wait_until(lambda: not engine_threads())
