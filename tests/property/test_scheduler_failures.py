"""Steps and sequences that fail, what comes from outside, and older callers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scheduler_oracle import VOCAB, KvSimulator, expected_output, memory
from scheduler_runs import add, assert_as_alone, assert_idle, prompt_of, start

from pocket_backend.api import EngineError, SamplingParams
from pocket_backend.core import (
    ContinuousBatchScheduler,
    ExecuteOutput,
    MemoryInfo,
    RequestStatus,
    ScheduledRequest,
)


def test_failing_step_fails_only_the_culprit() -> None:
    run = start(memory(max_batch_tokens=16))
    good = [add(run, f"good{i}", prompt_of(9, seed=i), 12) for i in range(3)]
    bad = add(run, "bad", prompt_of(9, seed=9), 12)
    for _ in range(4):
        run.step()
    while bad.status is not RequestStatus.FINISHED:
        # The executor raises whenever "bad" is in the step.
        plan = run.scheduler.schedule(run.now)
        assert plan is not None
        for slot in plan.reset_slots:
            run.kv.reset_slot(slot)
        if bad in plan.sequences:
            with pytest.raises(RuntimeError):
                run.kv.execute(plan, fail=True)
            failed = run.scheduler.fail_step(plan, EngineError("illegal instruction"))
            assert [u.request_id for u in failed] in ([], ["bad"])
        else:
            results = run.kv.execute(plan)
            run._deliver(run.scheduler.update(plan, results, run.now))
        run.scheduler.check_integrity()
    assert bad.finish_reason == "error"
    run.drain()
    assert_as_alone(run, *good)
    assert_idle(run)


@pytest.mark.parametrize("fail_at", range(8))
def test_forks_survive_a_failed_step(fail_at: int) -> None:
    run = start(memory(max_batch_tokens=6))
    first = add(run, "r", prompt_of(10), 6, n=3)
    other = add(run, "other", prompt_of(7, seed=1), 9)
    for step in range(10):
        run.step(fail=step == fail_at)
    run.drain()
    assert first.group is not None
    alive = [s for s in (other, *first.group.sequences) if s.finish_reason != "error"]
    assert len(alive) >= 3
    assert_as_alone(run, *alive)
    assert_idle(run)


def test_fork_whose_step_failed_does_not_repeat_the_copy_without_its_source() -> None:
    run = start(memory())
    first = add(run, "r", prompt_of(10), 6, n=2)
    run.step()
    plan = run.step(fail=True)
    assert plan is not None
    assert plan.requests[1].block_copies
    run.scheduler.finish("r", "stop", 0)
    other = add(run, "other", prompt_of(20, seed=1))
    run.drain()
    assert first.group is not None
    assert_as_alone(run, first.group.sequences[1], other)


def test_outputs_that_do_not_belong_to_the_plan_are_refused_unchanged() -> None:
    run = start(memory())
    a = add(run, "a", prompt_of(3))
    add(run, "b", prompt_of(3, seed=1))
    plan = run.scheduler.schedule(0.0)
    assert plan is not None
    results = run.kv.execute(plan)
    for wrong in (results[:1], results[::-1], []):
        with pytest.raises(EngineError):
            run.scheduler.update(plan, wrong, 0.0)
    with pytest.raises(EngineError):
        run.scheduler.schedule(0.0)
    assert a.num_generated_tokens == 0
    run.scheduler.update(plan, results, 0.0)
    with pytest.raises(EngineError):
        run.scheduler.update(plan, results, 0.0)


def test_finish_from_outside_frees_the_slot_in_the_same_step() -> None:
    run = start(memory(max_slots=1))
    first = add(run, "first", prompt_of(5), None)
    second = add(run, "second", prompt_of(5, seed=1), 1)
    run.step()
    assert run.scheduler.finish("first", "stop")
    assert first.finish_reason == "stop"
    plan = run.step()
    assert plan is not None
    assert plan.reset_slots == (0,)
    assert second.status is RequestStatus.FINISHED


def test_stop_tokens_and_min_tokens() -> None:
    run = start(memory())
    prompt = prompt_of(6)
    free, _ = expected_output(prompt, SamplingParams(max_tokens=20, ignore_eos=True), 1, 10**6)
    stop = free[4]
    sequence = add(run, "r", prompt, 20, stop=(stop,))
    run.drain()
    end = run.ends[("r", 0)]
    at = free.index(stop)
    assert list(sequence.generated_tokens) == free[: at + 1]
    assert (end.finish_reason, end.stop_reason) == ("stop", stop)


def test_sequence_begun_elsewhere_goes_on_as_if_here() -> None:
    run = start(memory())
    prompt = prompt_of(9)
    params = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)
    wanted, _ = expected_output(prompt, params, 7, 10**6)
    moved = ScheduledRequest("moved", prompt, wanted[:5], sampling_params=params)
    run.scheduler.add_request(moved, 0.0)
    run.drain()
    assert list(moved.generated_tokens) == wanted
    assert run.outputs[("moved", 0)] == wanted[5:]


def test_one_block_per_slot_serves_executors_without_paging() -> None:
    """A model whose state cannot be paged: one block is one slot's whole context."""
    run = start(MemoryInfo(3, 64, 3, 64, 16, VOCAB))
    sequences = [add(run, f"r{i}", prompt_of(20, seed=i), 30) for i in range(7)]
    run.drain()
    assert_as_alone(run, *sequences)
    assert run.scheduler.stats().preemptions == 0


def test_older_names_work_on_top() -> None:
    scheduler = ContinuousBatchScheduler(
        max_batch_size=2, max_total_tokens=256, enable_prefix_cache=True
    )
    kv: dict[str, list[int]] = {}
    for i in range(3):
        scheduler.add_request(
            ScheduledRequest(f"r{i}", [1 + i, 2, 3], sampling_params=SamplingParams(max_tokens=3))
        )
    prefill, decode = scheduler.schedule_step()
    assert [r.request_id for r in prefill] == ["r0", "r1"]
    assert not decode
    steps = 0
    while prefill or decode:
        outputs = []
        for request in (*decode, *prefill):
            kv.setdefault(request.request_id, []).extend(request.token_ids)
            outputs.append(ExecuteOutput(request.request_id, 9 if request.samples else None))
        if steps == 1:
            scheduler.complete_request("r0")
            scheduler.complete_request("r0")
        prefill, decode = scheduler.schedule_step(outputs)
        steps += 1
    assert kv == {"r0": [1, 2, 3, 9], "r1": [2, 2, 3, 9, 9], "r2": [3, 2, 3, 9, 9]}
    assert not scheduler.has_work()


def test_oracle_itself_notices_a_wrong_block() -> None:
    """The simulator must be able to fail: hand it a plan with a table of somebody else."""
    run = start(memory())
    add(run, "a", prompt_of(6), 4)
    add(run, "b", prompt_of(6, seed=1), 4)
    run.step()
    kv: KvSimulator = run.kv
    kv.tables[0], kv.tables[1] = kv.tables[1], kv.tables[0]
    act: Callable[[], object] = run.step
    with pytest.raises(AssertionError):
        act()
