"""Models with states on the PyTorch backend: snapshots, and what is said when they do not fit.

That batches, chunks, prefix hits and preemption change no token is in ``test_torch_models.py``, for
every architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import VOCAB, Checkpoint, write_checkpoint, write_tokenizer
from tiny_hf import edit_config
from together import arriving_together

from pocket_backend.api import EngineArgs, EngineError, ModelLoadError, SamplingParams
from pocket_backend.core.step import ExecuteOutput, ExecuteRequest
from pocket_backend.engine.llm import LLM
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.registry import choose_backend
from pocket_backend.executors.torch_engine import PyTorchBackend

pytestmark = pytest.mark.parity

NEW = 12
MODELS = ["qwen3_5", "minimax", "mamba2"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: Any, tmp_path_factory: Any) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=1)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: Any) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_5", seed=2)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    stem = random.integers(3, VOCAB, 40).tolist()
    return [stem[:n] + random.integers(3, VOCAB, 3).tolist() for n in (0, 17, 32, 40, 40)]


def generate(checkpoint: Checkpoint, params: SamplingParams, **options: Any) -> tuple[Any, Any]:
    engine = UnifiedEngine(PyTorchBackend(checkpoint.path, options), max_total_tokens=1 << 20)
    try:
        with arriving_together(engine, len(prompts())):
            results = LLM(engine=engine).generate(prompts(), params)
        return [list(result.token_ids) for result in results], engine.stats()
    finally:
        engine.close()


def test_tokens_are_those_of_generate(checkpoint: Checkpoint) -> None:
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    outputs, _ = generate(checkpoint, params, max_batch_size=3, num_blocks=64)
    assert outputs == [checkpoint.greedy(prompt, NEW) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)


@pytest.mark.parametrize("snapshots", [0, 6])
def test_choices_in_little_memory_with_few_snapshots(qwen: Checkpoint, snapshots: int) -> None:
    """Sequences of one to three blocks that grow to three to five, in seven."""
    count = 30
    outputs, stats = generate(
        qwen,
        SamplingParams(max_tokens=count, ignore_eos=True, n=2),
        max_batch_size=4,
        max_batch_tokens=24,
        num_blocks=7,
        max_state_snapshots=snapshots,
        state_snapshot_interval_tokens=16,
    )
    for index, prompt in enumerate(prompts()):
        first, second = outputs[2 * index : 2 * index + 2]
        assert first == second
        assert qwen.best_next(prompt + first[:-1])[len(prompt) - 1 :] == first
    assert stats.preemptions
    assert (stats.prefix_hit_tokens > 0) == (snapshots > 0)


def test_llm_serves_a_hybrid_from_a_directory(tmp_path: Path) -> None:
    qwen = write_checkpoint(tmp_path, "qwen3_5", seed=3)
    write_tokenizer(tmp_path)
    args = EngineArgs(
        model=str(tmp_path),
        backend="torch",
        kv_cache_tokens=1024,
        threads=1,
        backend_options={"state_snapshot_interval_tokens": 16, "max_state_snapshots": 5},
    )
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(args) as llm:
        memory = llm.engine.memory_info
        # Two layers with a convolution over 2 * 2 * 16 + 4 * 8 channels and 4 heads of 16 x 8.
        assert memory.state_bytes == 2 * 4 * (96 * 4 + 4 * 16 * 8)
        assert (memory.num_state_snapshots, memory.state_snapshot_interval) == (5, 16)
        [turn] = llm.generate("The first turn of a conversation", params)
        history = "The first turn of a conversation" + turn.text + " and the second"
        [again] = llm.generate(history, params)
        assert again.usage.cached_tokens == 32  # saved as the output passed it
        ids = llm.tokenizer.encode(history)
        tokens = list(again.token_ids)
        with torch.no_grad():
            logits = qwen.model(torch.tensor([ids + tokens[:-1]])).logits[0]
        assert tokens == logits[len(ids) - 1 :, :259].argmax(dim=1).tolist()


def test_auto_takes_torch_for_a_hybrid_that_the_cpp_engine_does_not_run(
    checkpoint: Checkpoint,
) -> None:
    choice = choose_backend(EngineArgs(model=str(checkpoint.path)))
    if choice.name != "cpp":  # which runs more models with every version
        assert choice.name == "torch"
        assert "does not run" in choice.reason


def step(tokens: list[int], start: int = 0, slot: int = 0, **fields: Any) -> ExecuteRequest:
    """A part of a sequence in ``slot``, whose blocks are 4 * slot .. 4 * slot + 3."""
    request = ExecuteRequest(
        f"r{slot}",
        tuple(tokens),
        slot,
        is_prefill=len(tokens) > 1,
        sampling_params=SamplingParams(logprobs=1),
        start_position=start,
        is_new=start == 0,
        block_ids=tuple(range(4 * slot, 4 * slot + 4)) if start == 0 else (),
    )
    return replace(request, **fields)


def assert_alike(one: ExecuteOutput, other: ExecuteOutput) -> None:
    """The same token with the same log probability: a wrong state shows in that, if not in it."""
    assert one.token_id == other.token_id
    assert one.logprobs is not None
    assert other.logprobs is not None
    assert one.logprobs.token_logprob == pytest.approx(other.logprobs.token_logprob, abs=1e-4)


def test_a_state_is_loaded_before_its_place_is_written(qwen: Checkpoint) -> None:
    backend = PyTorchBackend(qwen.path, {"num_blocks": 32, "max_state_snapshots": 1})
    assert backend.supports_feature("recurrent_state")
    assert not backend.supports_feature("block_copies")
    prompt = prompts()[3][:20]
    try:
        [whole] = backend.execute_model([step(prompt)])
        backend.execute_model([step(prompt[:16], slot=1, samples=False, state_target=0)])
        [rest] = backend.execute_model([step(prompt[16:], 16, slot=1)])
        assert_alike(rest, whole)
        # Resumed in another slot over the same blocks, while a third overwrites the snapshot.
        resumed = step(
            prompt[16:], 16, slot=2, is_new=True, block_ids=(4, 8, 9, 10), state_source=0
        )
        other = step(prompts()[4][:16], slot=3, state_target=0)
        outputs = backend.execute_model([other, resumed])
        assert_alike(outputs[1], whole)
        # A new sequence starts from zero whatever the slot held.
        [again] = backend.execute_model([step(prompt)])
        assert_alike(again, whole)
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_source": 1}, "snapshot 1 is not from 0 to 0"),
        ({"state_target": -1}, "snapshot -1 is not from 0 to 0"),
        ({"start_position": 16}, "starts at 16 without a state"),
    ],
)
def test_broken_contracts_fail_the_step(
    qwen: Checkpoint, fields: dict[str, int], message: str
) -> None:
    backend = PyTorchBackend(qwen.path, {"num_blocks": 8, "max_state_snapshots": 1})
    try:
        with pytest.raises(EngineError, match=message):
            backend.execute_model([step([5, 6], **fields)])
        with pytest.raises(EngineError, match="inside PyTorchBackend steps only"):
            backend._model(torch.tensor([[1]]), use_cache=False)
    finally:
        backend.close()


def test_states_keep_their_type_in_low_precision(qwen: Checkpoint) -> None:
    backend = PyTorchBackend(qwen.path, {"num_blocks": 8, "dtype": "bfloat16"})
    try:
        memory = backend.get_memory_info()
        # Convolution inputs are bfloat16, the recurrent state is float32.
        assert memory.state_bytes == 2 * (2 * 96 * 4 + 4 * 4 * 16 * 8)
        assert memory.num_state_snapshots >= 4
        assert memory.state_snapshot_interval == 512
        [output] = backend.execute_model([step(prompts()[1])])
        assert output.token_id is not None
    finally:
        backend.close()


def test_a_model_of_states_only_keeps_no_keys_and_values(tmp_path: Path) -> None:
    mamba = write_checkpoint(tmp_path, "mamba2")
    edit_config(tmp_path, max_position_embeddings=None)  # as real ones are
    backend = PyTorchBackend(mamba.path, {"max_batch_size": 2})
    try:
        memory = backend.get_memory_info()
        # Two layers with a convolution over 128 + 2 * 2 * 8 channels and 8 heads of 16 x 8.
        assert memory.state_bytes == 2 * 4 * (160 * 4 + 8 * 16 * 8)
        assert memory.kv_cache_bytes == 0
        assert memory.num_state_snapshots == 82
        assert memory.max_context == memory.num_blocks * memory.block_size == 1 << 17
        [output] = backend.execute_model([step(prompts()[4])])
        assert output.token_id == mamba.best_next(prompts()[4])[-1]
    finally:
        backend.close()


def test_recurrent_layers_of_another_build_are_refused_by_name(tmp_path: Path) -> None:
    """Whether theirs can go on from a state that was saved, nobody has tested."""
    import transformers

    config = transformers.RecurrentGemmaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        lru_width=32,
        attention_window_size=16,
    )
    transformers.RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="recurrent_gemma has recurrent layers that"):
        PyTorchBackend(tmp_path)
