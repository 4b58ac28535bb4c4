"""Requests for the scheduler on ``scheduler_oracle``'s simulated executor, and what must come out.

The executor checks every KV position that is read; outputs are those of a sequence by itself.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from scheduler_oracle import EOS, VOCAB, Run, expected_output

from pocket_backend.api import SamplingParams
from pocket_backend.core import (
    ContinuousBatchScheduler,
    MemoryInfo,
    ScheduledRequest,
    SchedulerConfig,
)
from pocket_backend.core.admission import token_limit


def start(sizes: MemoryInfo, config: SchedulerConfig | None = None) -> Run:
    return Run(ContinuousBatchScheduler(sizes, config, eos_token_ids=[EOS]), keep_plans=True)


def add(
    run: Run,
    name: str,
    prompt: Sequence[int],
    max_tokens: int | None = 8,
    *,
    n: int = 1,
    seed: int | None = 1,
    priority: int = 0,
    deadline: float | None = None,
    salt: str = "",
    adapter: str = "",
    ignore_eos: bool = True,
    stop: tuple[int, ...] = (),
) -> ScheduledRequest:
    params = SamplingParams(
        max_tokens=max_tokens, n=n, seed=seed, ignore_eos=ignore_eos, stop_token_ids=stop
    )
    request = ScheduledRequest(
        name,
        prompt,
        sampling_params=params,
        priority=priority,
        deadline_seconds=deadline,
        cache_salt=salt,
        adapter=adapter,
    )
    return run.scheduler.add_request(request, run.now)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def assert_as_alone(run: Run, *sequences: ScheduledRequest) -> None:
    limit = token_limit(run.scheduler.memory)
    for sequence in sequences:
        wanted, reason = expected_output(
            sequence.prompt_tokens, sequence.sampling_params, sequence.seed, limit
        )
        assert list(sequence.generated_tokens) == wanted
        assert sequence.finish_reason == reason


def assert_idle(run: Run) -> None:
    run.scheduler.check_integrity()
    stats = run.scheduler.stats()
    assert stats.blocks.in_use == stats.running == stats.waiting == 0
    assert stats.free_slots == run.scheduler.memory.max_slots
