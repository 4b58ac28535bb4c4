"""Models with recurrent state: where snapshots are made, and who starts from them.

``RecurrentSimulator`` checks that every state is that of exactly the tokens before it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from recurrent_oracle import RecurrentSimulator, check_snapshots
from scheduler_oracle import EOS, Run, memory
from scheduler_runs import add, assert_as_alone, assert_idle, prompt_of

from pocket_backend.core import ContinuousBatchScheduler, MemoryInfo, SchedulerConfig
from pocket_backend.core.asking import execute_request
from pocket_backend.core.lifecycle import Lifecycle
from pocket_backend.core.sharing import BudgetSharing
from pocket_backend.kv import BlockManager


def start(
    sizes: MemoryInfo,
    config: SchedulerConfig | None = None,
    *,
    snapshots: int = 50,
    interval: int = 1000,
) -> Run:
    sizes = replace(
        sizes, state_bytes=1, num_state_snapshots=snapshots, state_snapshot_interval=interval
    )
    scheduler = ContinuousBatchScheduler(sizes, config, eos_token_ids=[EOS])
    return Run(scheduler, keep_plans=True, simulator=RecurrentSimulator)


def saved_at(run: Run) -> list[int]:
    return [
        request.start_position + len(request.token_ids)
        for plan in run.plans
        for request in plan.requests
        if request.state_target is not None
    ]


def started_at(run: Run, name: str) -> list[int]:
    return [
        request.start_position
        for plan in run.plans
        for request in plan.requests
        if request.request_id == name and request.is_new
    ]


def test_the_last_boundary_of_a_prompt_is_saved_for_the_next_turn() -> None:
    run = start(memory())
    first = add(run, "a", prompt_of(22), 3)
    run.drain()
    assert saved_at(run) == [20]
    history = [*first.tokens, 5, 6, 7]
    second = add(run, "b", history, 3)
    run.drain()
    assert started_at(run, "b") == [20]
    assert second.cached_tokens == 20
    assert_as_alone(run, first, second)
    assert_idle(run)


@pytest.mark.parametrize("length", [20, 21])
def test_the_same_prompt_computes_its_last_tokens_only(length: int) -> None:
    run = start(memory())
    first = add(run, "a", prompt_of(length), 3)
    run.drain()
    again = add(run, "b", prompt_of(length), 3)
    run.drain()
    # The last token is always computed, so its block's beginning is where a state is wanted.
    assert again.cached_tokens == (length - 1) // 4 * 4
    assert_as_alone(run, first, again)


def test_long_prompts_and_outputs_are_saved_about_every_interval() -> None:
    run = start(memory(max_batch_tokens=10), interval=12)
    request = add(run, "a", prompt_of(50), 20)
    run.drain()
    places = saved_at(run)
    # Chunks of 10 that end beyond 12 tokens without a snapshot end at a boundary. 48: the prompt's.
    assert places == [20, 40, 48, 60]
    assert_as_alone(run, request)


def test_choices_start_from_the_first_ones_snapshot() -> None:
    run = start(memory())
    first = add(run, "r", prompt_of(23), 6, n=3)
    run.drain()
    assert first.group is not None
    assert_as_alone(run, *first.group.sequences)
    assert started_at(run, "r#1") == started_at(run, "r#2") == [20]
    # The prompt, twice its last three tokens again, and five of each one's six output tokens.
    assert run.scheduler.stats().computed_tokens == 23 + 2 * 3 + 3 * 5
    assert run.kv.copies == 0
    assert_idle(run)


def test_prompts_that_arrive_together_wait_for_a_snapshot_where_they_part() -> None:
    run = start(memory(num_blocks=200, max_batch_tokens=16))
    stem = prompt_of(41)
    requests = [add(run, f"r{i}", [*stem, i, i, i], 4) for i in range(6)]
    run.drain()
    assert_as_alone(run, *requests)
    for i in range(1, 6):
        assert started_at(run, f"r{i}") == [40]
    assert 40 in saved_at(run)


def test_the_second_that_branches_off_leaves_a_snapshot_for_the_third() -> None:
    run = start(memory(num_blocks=200))
    stem = prompt_of(32)
    for name, tail in (("a", 1), ("b", 2), ("c", 3)):
        add(run, name, [*stem, *prompt_of(12, seed=tail)], 2)
        run.drain()
    assert [started_at(run, name) for name in "abc"] == [[0], [0], [32]]


def test_a_preempted_sequence_resumes_from_its_last_snapshot() -> None:
    run = start(memory(num_blocks=16, max_slots=2), interval=8)
    requests = [add(run, name, prompt_of(12, seed=ord(name)), 30) for name in "ab"]
    run.drain()
    stats = run.scheduler.stats()
    assert stats.preemptions
    assert_as_alone(run, *requests)
    resumed = [at for name in "ab" for at in started_at(run, name)[1:]]
    assert resumed
    assert min(resumed) > 0
    assert_idle(run)


@pytest.mark.parametrize("fails", [1, 2])
def test_after_a_failed_step_sequences_start_again_from_their_snapshots(fails: int) -> None:
    run = start(memory(max_batch_tokens=64), interval=8)
    requests = [add(run, f"r{i}", prompt_of(14, seed=i), 12) for i in range(3)]
    for _ in range(7):
        run.step()
    for _ in range(fails):
        run.step(fail=True)
    # The second failure hits a step of one, and that sequence with it.
    failed = [r for r in requests if r.finish_reason == "error"]
    assert len(failed) == fails - 1
    run.drain()
    assert_as_alone(run, *[r for r in requests if r not in failed])
    assert all(started_at(run, r.request_id)[-1] >= 8 for r in requests if r not in failed)
    assert_idle(run)


def test_without_a_place_for_a_state_nothing_is_cached() -> None:
    run = start(memory(), snapshots=0, interval=1)
    requests = [add(run, f"r{i}", prompt_of(20), 3) for i in range(3)]
    run.drain()
    assert_as_alone(run, *requests)
    assert saved_at(run) == []
    assert run.scheduler.stats().blocks.cached_only == 0
    assert_idle(run)


@pytest.mark.parametrize("snapshots", [0, 1, 4])
def test_many_requests_with_few_snapshots_equal_their_runs_alone(snapshots: int) -> None:
    rng = random.Random(snapshots)
    run = start(
        memory(num_blocks=40, max_slots=8, max_batch_tokens=24),
        SchedulerConfig(max_queue=300),
        snapshots=snapshots,
        interval=8,
    )
    stems = [prompt_of(40, seed=i) for i in range(3)]
    requests, cancelled = [], 0
    for i in range(60):
        prompt = rng.choice(stems)[: rng.randint(1, 40)] + prompt_of(rng.randint(0, 9), i)
        n = rng.choice([1, 1, 3])
        requests.append(add(run, f"r{i}", prompt, rng.choice([1, 10, 40]), n=n, seed=i))
        if i % 3 == 0:
            run.step(fail=i % 15 == 0)
        if i % 20 == 19:
            cancelled += run.scheduler.cancel(requests[rng.randrange(i)].request_id)
    run.drain()
    stats = run.scheduler.stats()
    assert stats.preemptions
    assert cancelled
    assert (stats.prefix_hit_tokens > 0) == (snapshots > 0)
    assert isinstance(run.kv, RecurrentSimulator)
    check_snapshots(run.scheduler, run.kv)
    assert_idle(run)
    for request in requests:
        assert request.group is not None
        for sequence in request.group.sequences:
            if sequence.finish_reason not in ("cancelled", "error"):
                assert_as_alone(run, sequence)


def test_models_without_state_run_the_same_code_as_before() -> None:
    scheduler = ContinuousBatchScheduler(memory())
    assert type(scheduler._life) is Lifecycle
    assert type(scheduler._life.blocks) is BlockManager
    assert type(scheduler._sharing) is BudgetSharing
    assert scheduler._ask is execute_request
