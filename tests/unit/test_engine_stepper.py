"""One step at a time, without threads: failures, deadlines, text, accounting."""

from __future__ import annotations

import pytest
from engine_support import ManualClock, Recorder, alone, make_stepper, request

from pocket_backend.api import (
    BackendUnavailableError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from pocket_backend.core.step import ExecuteOutput
from pocket_backend.engine.stepper import EngineStepper, FatalEngineError
from pocket_backend.executors.fake import FakeOptions
from pocket_backend.kv.pool import IntegrityError


def submit(stepper: EngineStepper, name: str, prompt=(1, 2, 3), max_tokens=8, **fields) -> Recorder:
    sink = Recorder()
    stepper.add(stepper.entry(request(name, prompt, max_tokens, **fields), sink))
    return sink


def run(stepper: EngineStepper, steps: int = 10_000) -> None:
    for _ in range(steps):
        if not stepper.step(lambda: None):
            return


def assert_clean(stepper: EngineStepper, executor) -> None:
    run(stepper)
    stepper.idle()
    assert stepper.stats.running == stepper.stats.waiting == stepper.stats.blocks_used == 0
    assert stepper.stats.slots_free == stepper.stats.slots_total
    assert not executor.occupied_slots
    assert stepper.stats.integrity_failures == 0


def test_a_request_runs_to_its_length() -> None:
    stepper, executor = make_stepper()
    sink = submit(stepper, "a", max_tokens=5)
    run(stepper)
    last = sink.wait()
    assert last.finish_reason == "length"
    assert len(sink.token_ids) == 5
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 5)
    assert sum(event.finish_reason is not None for event in sink.events) == 1
    assert_clean(stepper, executor)


def test_end_of_sequence_stops() -> None:
    options = FakeOptions(eos_probability=1.0)
    stepper, _ = make_stepper(options)
    sink = submit(stepper, "a")
    run(stepper)
    assert sink.wait().finish_reason == "stop"
    assert sink.wait().stop_reason is None
    assert sink.token_ids == (options.eos_token_id,)


def test_ignore_eos_and_min_tokens() -> None:
    stepper, _ = make_stepper(FakeOptions(eos_probability=1.0))
    ignoring = submit(stepper, "a", ignore_eos=True, max_tokens=4)
    waiting = submit(stepper, "b", min_tokens=3, max_tokens=9)
    run(stepper)
    assert ignoring.wait().finish_reason == "length"
    assert waiting.wait().finish_reason == "stop"
    assert len(waiting.token_ids) == 4


def test_stop_token_id_is_reported() -> None:
    stepper, _ = make_stepper()
    tokens = alone(request("x", (1, 2, 3))).results()[0].token_ids
    sink = submit(stepper, "a", stop_token_ids=[tokens[3]])
    run(stepper)
    assert sink.wait().finish_reason == "stop"
    assert sink.wait().stop_reason == tokens[3]
    assert sink.token_ids == tokens[: tokens.index(tokens[3]) + 1]


def test_timings_follow_the_clock() -> None:
    clock = ManualClock()
    stepper, executor = make_stepper(clock=clock)

    def tick(_requests: object) -> None:
        clock.now += 2.0

    executor.faults.before_step = tick
    sink = Recorder()
    entry = stepper.entry(request("a", (1, 2, 3), 3), sink)
    clock.now += 1.0  # in the inbox
    stepper.add(entry)
    run(stepper)
    timings = sink.wait().timings
    assert timings is not None
    assert timings.queue_seconds == pytest.approx(1.0)
    assert timings.prefill_seconds == pytest.approx(2.0)
    assert timings.ttft_seconds == pytest.approx(3.0)
    assert timings.decode_seconds == pytest.approx(4.0)
    assert timings.tpot_seconds == pytest.approx(2.0)
    assert timings.total_seconds == pytest.approx(7.0)


def test_cancel_between_execute_and_update_delivers_no_token_of_that_step() -> None:
    stepper, executor = make_stepper()
    sink = Recorder()
    entry = stepper.entry(request("a", (1, 2, 3)), sink)
    stepper.add(entry)
    stepper.step(lambda: None)
    assert len(sink.token_ids) == 1
    stepper.step(lambda: stepper.cancel(entry))
    assert sink.wait().finish_reason == "cancelled"
    assert sink.wait().error is None
    assert len(sink.token_ids) == 1
    stepper.cancel(entry)  # idempotent
    assert_clean(stepper, executor)


@pytest.mark.parametrize("fault", ["failing_requests", "nan_requests"])
def test_a_failing_request_fails_alone(fault: str) -> None:
    stepper, executor = make_stepper()
    getattr(executor.faults, fault).add("bad")
    bad, good = submit(stepper, "bad"), submit(stepper, "good", (4, 5))
    run(stepper)
    assert bad.wait().finish_reason == "error"
    assert isinstance(bad.wait().error, EngineError)
    assert good.token_ids == alone(request("g", (4, 5))).results()[0].token_ids
    assert_clean(stepper, executor)


def test_one_failed_step_changes_no_output() -> None:
    stepper, executor = make_stepper()
    sinks = [submit(stepper, f"r{i}", (i + 1, 7)) for i in range(4)]
    stepper.step(lambda: None)
    executor.faults.failing_steps = 1
    run(stepper)
    for index, sink in enumerate(sinks):
        expected = alone(request("x", (index + 1, 7))).results()[0].token_ids
        assert sink.wait().finish_reason == "length"
        assert sink.token_ids == expected
    assert stepper.counters.failed_steps == 1
    assert_clean(stepper, executor)


def test_the_request_that_makes_steps_fail_is_found() -> None:
    stepper, executor = make_stepper()

    def explode(requests: object) -> None:
        if any(asked.request_id == "bad" for asked in requests):  # type: ignore[attr-defined]
            raise ValueError("boom")

    sinks = {name: submit(stepper, name, (9, 9, ord(name[0]))) for name in ("a", "bad", "c", "d")}
    executor.faults.before_step = explode
    run(stepper)
    error = sinks["bad"].wait().error
    assert isinstance(error, EngineError)
    assert "boom" in str(error)
    assert isinstance(error.__cause__, ValueError)
    for name in ("a", "c", "d"):
        assert sinks[name].wait().finish_reason == "length"
    assert_clean(stepper, executor)


def test_repeated_failures_and_a_gone_backend_are_fatal() -> None:
    stepper, executor = make_stepper(failure_limit=3)
    for index in range(6):
        submit(stepper, f"r{index}")
    executor.faults.failing_steps = 100
    with pytest.raises(FatalEngineError, match="3 steps failed in a row"):
        run(stepper)
    stepper, executor = make_stepper()
    submit(stepper, "a")
    executor.faults.dead = True
    with pytest.raises(FatalEngineError, match="backend is gone") as caught:
        run(stepper)
    assert isinstance(caught.value.__cause__, BackendUnavailableError)


def test_a_success_resets_the_count_of_failures() -> None:
    stepper, executor = make_stepper(failure_limit=2)
    for index in range(5):
        executor.faults.failing_steps = 1
        sink = submit(stepper, f"r{index}")
        run(stepper)
        assert sink.wait().finish_reason == "error"
        good = submit(stepper, f"g{index}")
        run(stepper)
        assert good.wait().finish_reason == "length"


@pytest.mark.parametrize("kind", ["fewer", "order", "no token"])
def test_outputs_that_break_the_contract_fail_the_step(kind: str) -> None:
    stepper, executor = make_stepper()
    real = executor.execute_model

    def broken(requests):
        outputs = list(real(requests))
        if kind == "fewer":
            return outputs[1:]
        if kind == "order":
            return [ExecuteOutput("someone else", 1) for _ in outputs]
        return [ExecuteOutput(output.request_id, None) for output in outputs]

    executor.execute_model = broken  # type: ignore[method-assign]
    sink = submit(stepper, "a")
    run(stepper)
    assert isinstance(sink.wait().error, EngineError)
    executor.execute_model = real  # type: ignore[method-assign]
    assert_clean(stepper, executor)


def test_deadline_while_waiting_and_while_running() -> None:
    clock = ManualClock()
    stepper, executor = make_stepper(clock=clock, max_batch_size=1)
    running = submit(stepper, "run", max_tokens=100, deadline_seconds=5.0)
    waiting = submit(stepper, "wait", max_tokens=100, deadline_seconds=3.0)
    for _ in range(4):
        stepper.step(lambda: None)
    assert stepper.next_deadline() == clock.now + 3.0
    clock.now += 4.0
    stepper.step(lambda: None)
    assert isinstance(waiting.wait().error, DeadlineExceededError)
    assert waiting.wait().finish_reason == "error"
    assert not running.done.is_set()
    clock.now += 2.0
    stepper.step(lambda: None)
    assert isinstance(running.wait().error, DeadlineExceededError)
    assert len(running.token_ids) >= 4
    assert stepper.next_deadline() is None
    assert_clean(stepper, executor)


def test_default_deadline() -> None:
    clock = ManualClock()
    stepper, _ = make_stepper(clock=clock, default_deadline_seconds=2.0)
    sink = submit(stepper, "a", max_tokens=100)
    stepper.step(lambda: None)
    assert stepper.next_deadline() == clock.now + 2.0
    clock.now += 3.0
    run(stepper)
    assert isinstance(sink.wait().error, DeadlineExceededError)


def test_full_queue_is_the_last_event() -> None:
    stepper, executor = make_stepper(max_batch_size=1, max_queue=1)
    sinks = [submit(stepper, f"r{i}") for i in range(3)]
    assert isinstance(sinks[2].wait().error, OverloadedError)
    run(stepper)
    assert sinks[0].wait().finish_reason == sinks[1].wait().finish_reason == "length"
    assert_clean(stepper, executor)


def test_a_prompt_beyond_the_pool_is_refused_and_blocks_nobody() -> None:
    options = FakeOptions(num_blocks=4, block_size=4, max_context=1024)
    stepper, executor = make_stepper(options)
    big, small = submit(stepper, "big", range(1, 31)), submit(stepper, "small", (1, 2))
    run(stepper)
    assert isinstance(big.wait().error, InvalidRequestError)
    assert "4" in str(big.wait().error)
    assert small.wait().finish_reason == "length"
    assert_clean(stepper, executor)


def test_growth_past_the_pool_ends_with_length() -> None:
    options = FakeOptions(num_blocks=4, block_size=4, max_context=1024)
    stepper, executor = make_stepper(options)
    sink = submit(stepper, "a", (1, 2, 3), max_tokens=None)
    run(stepper)
    assert sink.wait().finish_reason == "length"
    assert len(sink.token_ids) == 16 - 3
    assert_clean(stepper, executor)


def test_a_sink_that_raises_ends_its_request_only() -> None:
    stepper, executor = make_stepper()
    calls = []

    def broken(event: object) -> None:
        calls.append(event)
        raise RuntimeError("client gone")

    stepper.add(stepper.entry(request("bad", (1, 2, 3)), broken))
    good = submit(stepper, "good")
    run(stepper)
    assert len(calls) == 1
    assert good.wait().finish_reason == "length"
    assert stepper.counters.requests["cancelled"] == 1
    assert_clean(stepper, executor)


def test_a_sink_that_raises_at_the_last_event_is_counted_once() -> None:
    stepper, executor = make_stepper()

    def broken(event) -> None:
        if event.last:
            raise RuntimeError("client gone")

    stepper.add(stepper.entry(request("bad", (1, 2, 3)), broken))
    run(stepper)
    assert sum(stepper.counters.requests.values()) == 1
    assert_clean(stepper, executor)


def test_a_bug_in_the_output_stage_fails_one_request() -> None:
    stepper, executor = make_stepper()
    bad_sink = Recorder()
    entry = stepper.entry(request("bad", (1, 2, 3)), bad_sink)

    def explode(*_args: object, **_kw: object) -> None:
        raise KeyError("bug")

    class Broken(type(entry.outputs[0])):  # type: ignore[misc]
        __slots__ = ()
        push = explode
        finish = explode

    entry.outputs[0].__class__ = Broken
    stepper.add(entry)
    good = submit(stepper, "good")
    run(stepper)
    assert isinstance(bad_sink.wait().error, EngineError)
    assert good.wait().finish_reason == "length"
    assert_clean(stepper, executor)


def test_n_choices_have_one_end_each_and_one_last_event() -> None:
    stepper, executor = make_stepper()
    sink = submit(stepper, "a", (1, 2, 3, 4, 5), n=3, temperature=0.9, seed=11, max_tokens=6)
    run(stepper)
    sink.wait()
    ends = [event for event in sink.events if event.finish_reason is not None]
    assert sorted(event.choice_index for event in ends) == [0, 1, 2]
    assert [event.last for event in ends] == [False, False, True]
    tokens = {
        index: tuple(t for e in sink.events if e.choice_index == index for t in e.token_ids)
        for index in range(3)
    }
    assert all(len(ids) == 6 for ids in tokens.values())
    assert len(set(tokens.values())) == 3
    first = alone(request("x", (1, 2, 3, 4, 5), temperature=0.9, seed=11, max_tokens=6))
    assert tokens[0] == first.results()[0].token_ids
    assert stepper.counters.requests["length"] == 1
    assert stepper.counters.generated_tokens == 18
    assert_clean(stepper, executor)


def test_cancel_of_a_forked_request_ends_every_choice() -> None:
    stepper, executor = make_stepper()
    sink = Recorder()
    entry = stepper.entry(request("a", (1, 2, 3), 50, n=4, temperature=1.0), sink)
    stepper.add(entry)
    for _ in range(3):
        stepper.step(lambda: None)
    stepper.cancel(entry)
    assert [event.finish_reason for event in sink.events if event.finish_reason] == [
        "cancelled"
    ] * 4
    assert_clean(stepper, executor)


def test_preemption_does_not_show_in_the_output() -> None:
    options = FakeOptions(num_blocks=12, block_size=4, max_slots=4, max_context=64)
    stepper, executor = make_stepper(options)
    sinks = [submit(stepper, f"r{i}", (i + 1, 2, 3, 4), max_tokens=20) for i in range(4)]
    run(stepper)
    for index, sink in enumerate(sinks):
        expected = alone(request("x", (index + 1, 2, 3, 4), 20), options).results()[0]
        assert sink.token_ids == expected.token_ids
    stepper.idle()
    assert stepper.stats.preemptions > 0
    assert_clean(stepper, executor)


def test_prefix_cache_hit_is_counted_and_changes_nothing() -> None:
    stepper, executor = make_stepper()
    prompt = tuple(range(1, 41))
    first = submit(stepper, "cold", prompt)
    run(stepper)
    second = submit(stepper, "warm", prompt)
    run(stepper)
    assert first.token_ids == second.token_ids
    assert first.wait().usage is not None
    assert second.wait().usage is not None
    assert first.wait().usage.cached_tokens == 0
    assert second.wait().usage.cached_tokens == 32
    assert_clean(stepper, executor)


def test_an_aborted_prefill_does_not_poison_the_cache() -> None:
    options = FakeOptions(max_batch_tokens=16)
    stepper, executor = make_stepper(options)
    prompt = tuple(range(1, 81))
    sink = Recorder()
    entry = stepper.entry(request("a", prompt), sink)
    stepper.add(entry)
    stepper.step(lambda: None)
    stepper.step(lambda: stepper.cancel(entry))
    again = submit(stepper, "b", prompt)
    run(stepper)
    assert again.token_ids == alone(request("x", prompt), options).results()[0].token_ids
    assert_clean(stepper, executor)


def test_idle_integrity_failure_is_reported_and_not_fatal(monkeypatch) -> None:
    stepper, _executor = make_stepper()

    def broken() -> None:
        raise IntegrityError("blocks do not add up")

    monkeypatch.setattr(stepper.scheduler, "check_integrity", broken)
    submit(stepper, "a")
    run(stepper)
    stepper.idle()
    stepper.idle()
    assert stepper.stats.integrity_failures == 1
    sink = submit(stepper, "b")
    run(stepper)
    assert sink.wait().finish_reason == "length"


def test_reports_say_what_a_step_did() -> None:
    stepper, executor = make_stepper()
    assert stepper.take_report() is None
    submit(stepper, "a", (1, 2, 3))
    stepper.step(lambda: None)
    report = stepper.take_report()
    assert report is not None
    assert (report.sequences, report.tokens, report.prefill_tokens) == (1, 3, 3)
    assert (report.events, report.failed) == (1, False)
    executor.faults.failing_steps = 1
    stepper.step(lambda: None)
    report = stepper.take_report()
    assert report is not None
    assert report.failed
    assert stepper.take_report() is None
