"""EngineLoop by itself, and a storm of requests from many threads."""

from __future__ import annotations

import random
import threading

import pytest
from engine_support import (
    WAIT,
    Gate,
    ManualClock,
    Recorder,
    alone,
    assert_baseline,
    make_engine,
    make_stepper,
    request,
    wait_until,
)

from pocket_backend.api import EngineError, OverloadedError
from pocket_backend.engine.loop import EngineLoop, LoopOptions
from pocket_backend.executors.fake import FakeOptions


def make_loop(options: LoopOptions | None = None, **arguments: object) -> EngineLoop:
    stepper, _ = make_stepper(**arguments)  # type: ignore[arg-type]
    return EngineLoop(stepper, options)


def test_start_and_stop_once() -> None:
    loop = make_loop()
    loop.start()
    with pytest.raises(EngineError, match="start"):
        loop.start()
    assert loop.stop()
    assert loop.stop()


def test_a_loop_that_was_never_started_stops() -> None:
    stepper, executor = make_stepper()
    loop = EngineLoop(stepper)
    assert loop.stop()
    assert executor.closed
    with pytest.raises(OverloadedError):
        loop.submit(stepper.entry(request("a", (1,)), Recorder()))
    with pytest.raises(EngineError, match="start"):
        loop.start()


def test_requests_submitted_before_the_start_run_after_it() -> None:
    stepper, _ = make_stepper()
    loop = EngineLoop(stepper)
    sink = Recorder()
    loop.submit(stepper.entry(request("a", (1,)), sink))
    loop.start()
    assert sink.wait().finish_reason == "length"
    loop.stop()


def test_requests_of_a_loop_that_never_started_get_an_end() -> None:
    stepper, _ = make_stepper()
    loop = EngineLoop(stepper)
    sink = Recorder()
    loop.submit(stepper.entry(request("a", (1,)), sink))
    loop.stop()
    assert isinstance(sink.wait().error, OverloadedError)


def test_call_returns_raises_and_times_out() -> None:
    stepper, executor = make_stepper()
    loop = EngineLoop(stepper)
    loop.start()
    engine_thread = loop.call(threading.get_ident, WAIT)
    assert engine_thread != threading.get_ident()
    assert loop.call(lambda: loop.call(threading.get_ident), WAIT) == engine_thread
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 // 0, WAIT)
    gate = Gate()
    executor.faults.before_step = gate
    sink = Recorder()
    loop.submit(stepper.entry(request("a", (1,)), sink))
    gate.wait_until_inside()
    with pytest.raises(TimeoutError):
        loop.call(lambda: None, 0.01)
    gate.open.set()
    sink.wait()
    loop.stop()
    with pytest.raises(EngineError, match="stopped"):
        loop.call(lambda: None)


def test_posts_keep_their_order_and_run_before_the_end() -> None:
    loop = make_loop()
    seen: list[int] = []
    loop.start()
    gate = threading.Event()
    loop.post(lambda: gate.wait(WAIT) and None)
    for index in range(100):
        loop.post(lambda index=index: seen.append(index))
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    gate.set()
    stopper.join(WAIT)
    assert seen == list(range(100))


def test_stop_gives_up_on_a_step_that_hangs() -> None:
    stepper, executor = make_stepper()
    gate = Gate()
    executor.faults.before_step = gate
    loop = EngineLoop(stepper)
    loop.start()
    sink = Recorder()
    loop.submit(stepper.entry(request("a", (1,)), sink))
    gate.wait_until_inside()
    assert not loop.stop(join_seconds=0.05)
    gate.open.set()
    assert loop.stop()
    assert isinstance(sink.wait().error, OverloadedError)


def test_a_waiting_engine_wakes_up_for_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be scheduled and nothing arrives: only time passes."""
    clock = ManualClock(0.0)
    stepper, _ = make_stepper(clock=clock)
    loop = EngineLoop(stepper, clock=clock, watchdog_thread=False)
    schedule, wait = stepper.scheduler.schedule, loop._wake.wait
    waits: list[float | None] = []

    def stuck(now: float):
        if len(waits) == 3:
            return schedule(now)
        clock.now += 0.05
        return None

    def recorded(timeout: float | None = None) -> bool:
        waits.append(timeout)
        return wait(timeout)

    monkeypatch.setattr(stepper.scheduler, "schedule", stuck)
    monkeypatch.setattr(loop._wake, "wait", recorded)
    sink = Recorder()
    loop.submit(stepper.entry(request("a", (1,), deadline_seconds=0.1), sink))
    loop.start()
    assert sink.wait().finish_reason == "error"
    loop.stop()
    # Until the deadline; then, as the scheduler may count it a little later, briefly but not idly.
    assert waits[:3] == [pytest.approx(0.05), pytest.approx(0.001), pytest.approx(0.001)]


def test_an_idle_loop_does_nothing() -> None:
    stepper, _ = make_stepper()
    loop = EngineLoop(stepper)
    turns: list[int] = []
    step = stepper.step
    stepper.step = lambda drain: (turns.append(1), step(drain))[1]  # type: ignore[method-assign]
    loop.start()
    loop.call(lambda: None, WAIT)
    before = len(turns)
    threading.Event().wait(0.2)
    assert len(turns) - before <= 2
    loop.stop()


def test_a_storm_from_many_threads() -> None:
    """Eight clients submit, cancel, drop and break; the ledger must add up."""
    options = FakeOptions(
        num_blocks=64, block_size=4, max_slots=6, max_batch_tokens=32, eos_probability=0.02
    )
    engine, executor = make_engine(options, max_batch_size=6, max_total_tokens=256, max_queue=24)
    outcomes: list[tuple[object, Recorder]] = []
    refused = 0
    lock = threading.Lock()

    def client(number: int) -> None:
        nonlocal refused
        dice = random.Random(number)
        for index in range(40):
            name = f"c{number}-{index}"
            prompt = (*range(1, dice.choice((2, 5, 9, 20))), 30 + dice.randrange(4))
            asked = request(
                name, prompt, dice.randrange(1, 25), temperature=dice.choice((0.0, 1.0)), seed=1
            )
            fate = dice.choice(("run", "run", "cancel", "fail", "drop"))
            if fate == "fail":
                executor.faults.failing_requests.add(name)
            sink = Recorder()
            try:
                if fate == "drop":
                    stream = engine.stream(asked)
                    next(stream)
                    del stream
                    continue
                engine.submit(asked, sink)
            except OverloadedError:
                with lock:
                    refused += 1
                continue
            if fate == "cancel":
                engine.cancel(name)
            if dice.random() < 0.7:
                sink.wait()
            with lock:
                outcomes.append((asked, sink))

    with engine:
        clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(4 * WAIT)
            assert not thread.is_alive()
        for _, sink in outcomes:
            sink.wait()
        assert_baseline(engine, executor)
        stats = engine.stats()
        assert engine.health().ready
    expected: dict[object, tuple[int, ...]] = {}
    finished = 0
    for asked, sink in outcomes:
        key = (asked.prompt_tokens, asked.sampling_params)  # type: ignore[attr-defined]
        if key not in expected:
            expected[key] = alone(asked, options).results()[0].token_ids  # type: ignore[arg-type]
        last = sink.wait()
        if last.finish_reason in ("stop", "length"):
            finished += 1
            assert sink.token_ids == expected[key]
        else:
            assert sink.token_ids == expected[key][: len(sink.token_ids)]
    assert finished > 50
    assert sum(stats.requests.values()) <= 320
    assert sum(stats.requests.values()) >= len(outcomes)


def test_a_stop_right_before_the_wait_is_not_missed() -> None:
    stepper, executor = make_stepper()
    loop = EngineLoop(stepper)
    idle = stepper.idle

    def stop_while_going_idle() -> None:
        idle()
        loop.ask_to_stop(3600.0)

    stepper.idle = stop_while_going_idle  # type: ignore[method-assign]
    loop.start()
    wait_until(lambda: executor.closed)
    assert loop.stop()


def test_a_dead_engine_admits_nothing_that_was_still_in_the_inbox() -> None:
    stepper, executor = make_stepper()
    loop = EngineLoop(stepper)
    gate = Gate()
    executor.faults.before_step = gate
    loop.start()
    sinks = [Recorder() for _ in range(3)]
    loop.submit(stepper.entry(request("a", (1,)), sinks[0]))
    gate.wait_until_inside()
    executor.faults.dead = True

    def submit_more() -> None:  # in the drain of the dying step: its adds come one drain later
        for index, sink in enumerate(sinks[1:]):
            loop.submit(stepper.entry(request(f"late-{index}", (1,)), sink))

    loop.post(submit_more)
    gate.open.set()
    for sink in sinks:
        assert sink.wait().finish_reason == "error"
    loop.call(lambda: None, WAIT)
    assert stepper.scheduler.stats().waiting == 0
    loop.stop()
