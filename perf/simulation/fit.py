"""Measuring steps of the real engine for the cost model: ``python -m perf.simulate --fit``.

Steps are handed to the executor directly. Their KV is whatever lies in the pool (zeros): the time
of a step does not depend on values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from perf.simulation.cost import Fit, attended_positions, fit
from pocket_backend.api import EngineArgs, SamplingParams
from pocket_backend.core.step import ExecuteRequest, MemoryInfo
from pocket_backend.executors.base import BackendExecutor
from pocket_backend.executors.registry import create_executor

SLOTS = 16
BUDGET = 512
POOL_TOKENS = 16 * 1024 + 4096
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

Step = Sequence[tuple[int, int]]
"""(start position, tokens) of each sequence; more than one token is a chunk."""


def shapes() -> Iterator[Step]:
    """Decode at several batch sizes and contexts, chunks at several depths, and mixtures."""
    for batch in (1, 2, 4, 8, 16):
        for context in (31, 300, 1000):
            yield [(context, 1)] * batch
    for depth in (0, 512, 2048, 3584):
        for chunk in (64, 256, 512):
            yield [(depth, chunk)]
    for batch, depth, chunk in ((4, 0, 128), (8, 512, 256), (15, 0, 384), (4, 2048, 508)):
        yield [*[(300, 1)] * batch, (depth, chunk)]


def measure(model: str, threads: int, repeats: int = 5) -> Fit:
    """Time every shape on the engine (best of ``repeats`` rounds) and fit the model.

    Raises:
        PocketLLMError: the model or the engine cannot be loaded.
    """
    executor = create_executor(
        EngineArgs(
            model=model,
            threads=threads,
            max_batch_size=SLOTS,
            max_num_batched_tokens=BUDGET,
            max_model_len=4096,
            kv_cache_tokens=POOL_TOKENS,
        )
    )
    try:
        rounds = [[_sample(executor, shape) for shape in shapes()] for _ in range(max(1, repeats))]
    finally:
        executor.close()
    return fit([min(same) for same in zip(*rounds, strict=True)])


def _sample(executor: BackendExecutor, shape: Step) -> tuple[int, int, int, float]:
    requests = build(shape, executor.get_memory_info())
    begin = time.perf_counter()
    executor.execute_model(requests)
    seconds = time.perf_counter() - begin
    for request in requests:
        executor.reset_slot(request.slot_id)
    prefill = sum(count for _, count in shape if count > 1)
    decode = sum(count for _, count in shape if count == 1)
    return prefill, decode, attended_positions(requests), seconds


def build(shape: Step, memory: MemoryInfo) -> list[ExecuteRequest]:
    """The step as an executor sees it, every sequence on blocks of its own.

    Raises:
        ValueError: the pool is too small for the shape.
    """
    requests: list[ExecuteRequest] = []
    block = 0
    for slot, (start, count) in enumerate(shape):
        needed = -(-(start + count) // memory.block_size)
        if block + needed > memory.num_blocks:
            raise ValueError(f"shape {shape}: more than {memory.num_blocks} blocks")
        requests.append(
            ExecuteRequest(
                request_id=f"fit-{slot}",
                token_ids=tuple(1 + (start + i) % 1000 for i in range(count)),
                slot_id=slot,
                is_prefill=count > 1,
                sampling_params=_GREEDY,
                start_position=start,
                is_new=True,
                block_ids=tuple(range(block, block + needed)),
            )
        )
        block += needed
    return requests
