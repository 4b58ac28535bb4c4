"""Many sequences in little memory, and what a step costs."""

from __future__ import annotations

import gc
import random
import sys

import pytest
from scheduler_oracle import VOCAB, Run, memory
from scheduler_runs import add, assert_as_alone, assert_idle, prompt_of, start

from pocket_backend.core import ContinuousBatchScheduler, ExecuteOutput, MemoryInfo, SchedulerConfig


@pytest.mark.parametrize("policy", ["priority", "fcfs", "lpm"])
def test_200_mixed_requests_in_a_pool_far_too_small_equal_their_runs_alone(policy: str) -> None:
    rng = random.Random(policy)
    run = start(
        memory(num_blocks=40, max_slots=12, max_batch_tokens=24),
        SchedulerConfig(policy=policy, max_queue=300),
    )
    stems = [prompt_of(40, seed=i) for i in range(4)]
    requests, cancelled = [], 0
    for i in range(200):
        prompt = rng.choice(stems)[: rng.randint(1, 40)] + prompt_of(rng.randint(0, 9), i)
        requests.append(
            add(
                run,
                f"r{i}",
                prompt,
                rng.choice([1, 10, 40, None]),
                n=rng.choice([1, 1, 1, 3]),
                seed=rng.choice([None, i]),
                priority=rng.randint(-2, 2),
                ignore_eos=rng.random() < 0.3,
                stop=rng.choice([(), (3, 4)]),
            )
        )
        if i % 3 == 0:
            run.step()
        if i % 20 == 19:
            cancelled += run.scheduler.cancel(requests[rng.randrange(i)].request_id)
    run.drain()
    stats = run.scheduler.stats()
    assert stats.preemptions > 20
    assert cancelled > 3
    assert stats.prefix_hit_tokens > 0
    assert run.kv.copies > 0
    assert_idle(run)
    for request in requests:
        assert request.group is not None
        for sequence in request.group.sequences:
            if sequence.finish_reason != "cancelled":
                assert_as_alone(run, sequence)


def test_cost_of_a_step_does_not_depend_on_the_context() -> None:
    def calls(context: int) -> int:
        scheduler = ContinuousBatchScheduler(MemoryInfo(4000, 16, 4, 1 << 16, 1 << 16, VOCAB))
        run = Run(scheduler)
        for i in range(4):
            add(run, f"r{i}", prompt_of(context, seed=i), 100)
        plan = scheduler.schedule(0.0)
        total = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal total
            total += event in ("call", "c_call")

        for step in range(33):
            assert plan is not None
            outputs = [
                ExecuteOutput(r.request_id, (step + r.slot_id) % VOCAB) for r in plan.requests
            ]
            sys.setprofile(count if step else None)
            scheduler.update(plan, outputs, 0.0)
            plan = scheduler.schedule(0.0)
            sys.setprofile(None)
        return total

    gc.disable()  # its callbacks would be counted
    try:
        assert calls(96) == calls(9600)
    finally:
        gc.enable()
