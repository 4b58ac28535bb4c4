"""The PyTorch backend against Transformers, sequence by sequence, for every architecture.

Greedy tokens must be equal whatever shares the steps: other sequences, chunks of any size, prefix
hits, preemption. Both sides compute in float32 on the same weights; the random models leave gaps
between the two best logits that are far above the difference that the order of additions makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import CONFIGS, SLOW, VOCAB, Checkpoint, write_checkpoint
from together import arriving_together

from pocket_backend.api import SamplingParams
from pocket_backend.engine.llm import LLM
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.torch_engine import PyTorchBackend

pytestmark = pytest.mark.parity

NEW = 20
SHARED = 48
"""The first two prompts begin with so many tokens of the last: three blocks."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    found = [random.integers(3, VOCAB, n).tolist() for n in (1, 5, 16, 33, 60, 100)]
    return [found[-1][:SHARED] + found[2], found[-1][:SHARED] + found[0], *found]


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CONFIGS],
)
def checkpoint(request: Any, tmp_path_factory: Any) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations on tiny tensors cost more to share among threads than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(checkpoint: Checkpoint, prompts: list[list[int]], **options: Any) -> tuple[Any, Any]:
    """(outputs, engine statistics) of all prompts at once, after the last one alone."""
    fields = {"max_batch_size": 4, "max_batch_tokens": 64, "num_blocks": 64} | options
    fields |= {"max_state_snapshots": 16}  # of models that have a state
    engine = UnifiedEngine(PyTorchBackend(checkpoint.path, fields), max_total_tokens=1 << 20)
    try:
        llm = LLM(engine=engine)
        params = SamplingParams(max_tokens=NEW, ignore_eos=True)
        [alone] = llm.generate([prompts[-1]], params)
        with arriving_together(engine, len(prompts)):
            results = llm.generate(prompts, params)
        assert results[-1].token_ids == alone.token_ids
        return [list(result.token_ids) for result in results], engine.stats()
    finally:
        engine.close()


def check(checkpoint: Checkpoint, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """One reference pass over prompt and output: by induction the same as generating."""
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NEW
        if checkpoint.stepwise:
            assert checkpoint.greedy(prompt, NEW) == output
            continue
        assert checkpoint.best_next(prompt + output[:-1])[len(prompt) - 1 :] == output


def test_batched_tokens_are_those_of_transformers(checkpoint, prompts) -> None:
    outputs, stats = run(checkpoint, prompts)
    check(checkpoint, prompts, outputs)
    assert stats.prefix_hit_tokens >= 3 * SHARED  # the last prompt comes twice
    assert stats.preemptions == 0
    # Else the check would say little: outputs differ, and are not one token repeated.
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)
    assert max(len(set(tokens)) for tokens in outputs) > NEW // 2


def test_small_chunks_and_preemption_change_nothing(checkpoint, prompts) -> None:
    """Three sequences that begin with two blocks and end with four, in eight."""
    few = [prompt[:30] for prompt in prompts if len(prompt) >= 30][:3]
    outputs, stats = run(checkpoint, few, max_batch_tokens=7, num_blocks=8)
    check(checkpoint, few, outputs)
    assert stats.preemptions > 0


def test_tokens_are_those_of_generate(tmp_path, prompts) -> None:
    llama = write_checkpoint(tmp_path, "llama", seed=1)
    outputs, _ = run(llama, prompts)
    assert outputs == [llama.greedy(prompt, NEW) for prompt in prompts]
