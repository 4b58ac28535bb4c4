"""The C++ engine under memory pressure gives bit-identical outputs to unconstrained runs.

A tiny model, real kernels. The engine is batch-invariant, so every difference would be an error in
blocks, copies, reuse, or in what counts as computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("pocket_cpp_core", reason="the native module is not built")
pytest.importorskip("gguf", reason="tiny models are written with the gguf package")

from tiny_gguf import TinyLlama, write_gguf

from pocket_backend.api import SamplingParams
from pocket_backend.core import (
    ContinuousBatchScheduler,
    ScheduledRequest,
    SchedulerConfig,
    SchedulerStats,
)
from pocket_backend.executors.cpp_engine import CppEngineBackend

CONTEXT = 128
VOCAB = 320
COUNT = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, TinyLlama(weight_format="Q4_0", tied=False, tokenizer_tokens=VOCAB))
    return Path(path)


def mixed_requests(seed: int) -> list[ScheduledRequest]:
    """Shared prefixes, forks, greedy and sampled, short and long."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB) for _ in range(70)] for _ in range(4)]
    made = []
    for index in range(COUNT):
        tail = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))]
        prompt = rng.choice(stems)[: rng.randint(1, 70)] + tail
        params = SamplingParams(
            max_tokens=rng.choice([1, 6, 20, None]),
            temperature=rng.choice([0.0, 0.9]),
            seed=index,
            n=rng.choice([1, 1, 1, 3]),
            ignore_eos=True,
        )
        made.append(
            ScheduledRequest(
                f"r{index}", prompt, sampling_params=params, priority=rng.randint(-1, 1)
            )
        )
    return made


def serve(
    model: Path,
    num_blocks: int,
    slots: int,
    config: SchedulerConfig,
    *,
    cancel: Callable[[int], str | None] = lambda _: None,
) -> tuple[dict[tuple[str, int], tuple[int, ...]], set[str], SchedulerStats, int]:
    """Outputs, cancelled ids, statistics, number of copied blocks."""
    options = {
        "max_batch_size": slots,
        "max_seq_len": CONTEXT,
        "num_blocks": num_blocks,
        "max_batch_tokens": 48,
    }
    executor = CppEngineBackend(model, options)
    try:
        scheduler = ContinuousBatchScheduler(executor.get_memory_info(), config)
        requests, cancelled, step, copies = mixed_requests(1), set(), 0, 0
        arrivals = iter(requests)
        while True:
            # A few arrive at a time, so that what has finished is cached, evicted, and hit.
            arrived = list(islice(arrivals, 3))
            for request in arrived:
                scheduler.add_request(request, float(step))
            name = cancel(step)
            if name is not None and scheduler.cancel(name):
                cancelled.add(name)
            plan = scheduler.schedule(float(step))
            step += 1
            if plan is None:
                if not arrived:
                    break
                continue
            for slot in plan.reset_slots:
                executor.reset_slot(slot)
            if plan.requests:
                copies += sum(len(r.block_copies) for r in plan.requests)
                scheduler.update(plan, executor.execute_model(plan.requests), float(step))
            if step % 16 == 0:
                scheduler.check_integrity()
        assert all(request.group is not None for request in requests)
        scheduler.check_integrity()
        outputs = {
            (s.request_id, s.choice_index): s.generated_tokens
            for request in requests
            if request.group is not None
            for s in request.group.sequences
        }
        return outputs, cancelled, scheduler.stats(), copies
    finally:
        executor.close()


def test_pool_far_too_small_changes_no_bit(model: Path) -> None:
    alone, _, relaxed, _ = serve(
        model, 64, 1, SchedulerConfig(enable_prefix_cache=False, block_copies=False)
    )
    assert relaxed.preemptions == 0

    rng = random.Random(2)

    def cancel(step: int) -> str | None:
        return f"r{rng.randrange(COUNT)}" if step % 8 == 7 else None

    # Nine blocks of 16 tokens: hardly more than one sequence at its longest.
    squeezed, cancelled, stats, copies = serve(
        model, 9, 6, SchedulerConfig(max_queue=COUNT), cancel=cancel
    )
    assert stats.preemptions > 20
    assert stats.evicted_blocks > 100
    assert stats.prefix_hit_tokens > 0
    assert copies > 0
    assert len(cancelled) > 5
    assert stats.blocks.in_use == 0
    for key, tokens in squeezed.items():
        if key[0] in cancelled:
            assert alone[key][: len(tokens)] == tokens
        else:
            assert alone[key] == tokens
