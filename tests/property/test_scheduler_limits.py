"""What is refused, and what ends a request before its time."""

from __future__ import annotations

import pytest
from scheduler_oracle import VOCAB, memory
from scheduler_runs import add, assert_as_alone, assert_idle, prompt_of, start

from pocket_backend.api import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from pocket_backend.core import ScheduledRequest, SchedulerConfig, StepPlan


def test_full_queue_refuses_and_says_so() -> None:
    run = start(memory(max_slots=1), SchedulerConfig(max_queue=2))
    for i in range(3):  # one could start at once
        add(run, f"r{i}", prompt_of(3))
    with pytest.raises(OverloadedError, match="max_queue 2"):
        add(run, "more", prompt_of(3))
    run.step()
    assert run.scheduler.stats().waiting == 2
    run.drain()
    add(run, "later", prompt_of(3))


def test_id_in_use_is_refused_until_it_ends() -> None:
    run = start(memory())
    add(run, "r", prompt_of(3))
    with pytest.raises(InvalidRequestError, match="request_id"):
        add(run, "r", prompt_of(3))
    # Cancelled while in flight and sent again at once: the old output is not taken for the new.
    second: list[ScheduledRequest] = []

    def replace(_: StepPlan) -> None:
        run.scheduler.cancel("r")
        second.append(add(run, "r", prompt_of(5, seed=1)))

    run.step(during=replace)
    run.drain()
    assert_as_alone(run, *second)


@pytest.mark.parametrize(
    ("prompt", "stop", "message"),
    [
        ([], (), "at least one token"),
        ([1, VOCAB], (), r"got 50; token ids are 0 to 49"),
        ([1, -1], (), "got -1"),
        ([1], (10**9,), "stop_token_ids: got 1000000000"),
    ],
)
def test_bad_tokens_are_refused(prompt: list[int], stop: tuple[int, ...], message: str) -> None:
    run = start(memory())
    with pytest.raises(InvalidRequestError, match=message):
        add(run, "r", prompt, stop=stop)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 10**400),
        ("deadline_seconds", float("nan")),
        ("deadline_seconds", 0.0),
        ("deadline_seconds", float("inf")),
        ("cache_salt", "x" * 2000),
    ],
)
def test_values_that_would_break_the_queues_are_refused(field: str, value: object) -> None:
    run = start(memory())
    request = ScheduledRequest("r", [1], **{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=f"{field}: got"):
        run.scheduler.add_request(request, 0.0)
    assert not run.scheduler.has_work()


def test_a_request_object_serves_once() -> None:
    run = start(memory())
    sequence = add(run, "r", prompt_of(3))
    run.drain()
    with pytest.raises(EngineError, match="queued before"):
        run.scheduler.add_request(sequence, 0.0)


@pytest.mark.parametrize("prompt", [["a"], [2**31], [1.5], [None]])
def test_tokens_that_are_no_int32_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="integer"):
        ScheduledRequest("r", prompt)


def test_deadline_ends_queued_and_running_requests() -> None:
    run = start(memory(max_slots=1))
    running = add(run, "running", prompt_of(5), None, deadline=1.0)
    add(run, "queued", prompt_of(5, seed=1), 5, deadline=0.5)
    kept = add(run, "kept", prompt_of(5, seed=2), 5)
    for _ in range(5):
        run.step()
    run.now = 0.6
    run.step()
    assert list(run.ends) == [("queued", 0)]
    run.now = 1.1
    run.drain()
    assert running.num_generated_tokens > 0
    for name in ("queued", "running"):
        end = run.ends[(name, 0)]
        assert (end.finish_reason, end.request_done) == ("error", True)
        assert isinstance(end.error, DeadlineExceededError)
    assert_as_alone(run, kept)
    assert_idle(run)


def test_queue_deadline_spares_what_has_started() -> None:
    run = start(memory(max_slots=1), SchedulerConfig(queue_timeout_seconds=0.5))
    started = add(run, "started", prompt_of(5), 20)
    add(run, "queued", prompt_of(5, seed=1), 5)
    run.step()
    run.now = 10.0
    run.drain()
    assert_as_alone(run, started)
    assert isinstance(run.ends[("queued", 0)].error, DeadlineExceededError)
    assert "0.5 s" in str(run.ends[("queued", 0)].error)


def test_deadlines_do_not_keep_finished_requests() -> None:
    run = start(memory(), SchedulerConfig(default_deadline_seconds=1e6))
    for i in range(500):
        add(run, f"r{i}", [1, 2], 1)
        run.step()
    assert len(run.scheduler._deadlines._heap) < 200
