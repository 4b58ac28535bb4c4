"""On which thread sinks, hooks and posted callables of UnifiedEngine run, and in what order."""

from __future__ import annotations

import threading

from engine_support import (
    WAIT,
    Gate,
    Recorder,
    assert_baseline,
    make_engine,
    request,
    wait_until,
)


def test_sinks_hooks_and_posts_run_on_one_thread() -> None:
    seen: set[int] = set()
    engine, _ = make_engine(on_step_end=[lambda _report: seen.add(threading.get_ident())])
    with engine:
        engine.add_step_hook(lambda _report: seen.add(threading.get_ident()))
        done = threading.Event()
        engine.post(lambda: seen.add(threading.get_ident()))

        def sink(event) -> None:
            seen.add(threading.get_ident())
            if event.last:
                done.set()

        engine.submit(request("a", (1, 2)), sink)
        assert done.wait(WAIT)
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_hooks_see_every_delivery_also_without_a_step() -> None:
    gate = Gate()
    delivered: list[int] = []
    engine, executor = make_engine(
        max_batch_size=1, on_step_end=[lambda report: delivered.append(report.events)]
    )
    executor.faults.before_step = gate
    with engine:
        sinks = [Recorder(), Recorder()]
        engine.submit(request("a", (1, 2)), sinks[0])
        gate.wait_until_inside()
        engine.submit(request("b", (1, 2)), sinks[1])
        engine.cancel("a")
        engine.cancel("b")
        gate.open.set()
        for sink in sinks:
            sink.wait()
        wait_until(lambda: sum(delivered) == 2)
    assert sum(delivered) == sum(len(sink.events) for sink in sinks)


def test_raising_hooks_and_posts_change_nothing() -> None:
    def broken(*_args: object) -> None:
        raise ValueError("bug in a hook")

    engine, executor = make_engine(on_step_end=[broken])
    with engine:
        engine.post(broken)
        assert len(list(engine.generate([1, 2], 3))) == 4
        assert_baseline(engine, executor)


def test_a_post_that_posts_itself_does_not_starve_the_steps() -> None:
    engine, _ = make_engine()
    with engine:

        def again() -> None:
            engine.post(again)

        engine.post(again)
        assert len(list(engine.generate([1, 2], 50))) == 51
