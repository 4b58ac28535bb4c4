"""Who goes first, who waits, who is preempted."""

from __future__ import annotations

import pytest
from scheduler_oracle import Run, memory
from scheduler_runs import add, assert_as_alone, prompt_of, start

from pocket_backend.core import RequestStatus, SchedulerConfig


def first_starts(run: Run) -> list[str]:
    """Request ids in the order of their first step."""
    order: dict[str, None] = {}
    for plan in run.plans:
        for request in plan.requests:
            order.setdefault(request.request_id)
    return list(order)


def test_priority_then_arrival() -> None:
    run = start(memory(max_slots=1))
    for name, priority in [("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)]:
        add(run, name, prompt_of(3, seed=ord(name)), 2, priority=priority)
    run.drain()
    assert first_starts(run) == ["c", "e", "a", "d", "b"]


def test_fcfs_ignores_priority() -> None:
    run = start(memory(max_slots=1), SchedulerConfig(policy="fcfs"))
    for name, priority in [("a", 0), ("b", 1), ("c", -1)]:
        add(run, name, prompt_of(3, seed=ord(name)), 2, priority=priority)
    run.drain()
    assert first_starts(run) == ["a", "b", "c"]


@pytest.mark.parametrize(("ageing", "served"), [(10.0, True), (None, False)])
def test_low_priority_is_served_under_a_stream_of_higher_ones(
    ageing: float | None, served: bool
) -> None:
    run = start(memory(max_slots=1), SchedulerConfig(priority_ageing_seconds=ageing))
    low = add(run, "low", prompt_of(3), 1, priority=2)
    for i in range(60):
        add(run, f"high{i}", prompt_of(3, seed=i), 1)
        run.now += 1.0
        run.step()
    assert (low.status is RequestStatus.FINISHED) == served


def test_lpm_serves_the_longest_cached_prefix_first_but_not_for_ever() -> None:
    config = SchedulerConfig(policy="lpm", lpm_max_overtakes=3)
    run = start(memory(max_slots=1), config)
    cached = prompt_of(16)
    add(run, "warm", cached, 1)
    run.drain()
    add(run, "cold", prompt_of(16, seed=1), 1)
    for i in range(6):
        add(run, f"hit{i}", [*cached, i], 1)
    run.drain()
    assert first_starts(run) == ["warm", "hit0", "hit1", "hit2", "cold", "hit3", "hit4", "hit5"]


def test_preemption_takes_the_lowest_ranked() -> None:
    run = start(memory(num_blocks=12))
    low = add(run, "low", prompt_of(8, seed=1), 30, priority=1)
    high = add(run, "high", prompt_of(8, seed=2), 30)
    run.drain()
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)
    assert_as_alone(run, low, high)
