"""Qwen3.5 in the C++ engine: recurrent states, snapshots, and what the scheduler makes of them.

It must not matter whether a sequence continues from a snapshot, a cached prefix, or after a
preemption. That is compared bit for bit, or token by token.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_driver import Part
from hf_parity import exact
from tiny_checkpoints import TOKENIZER_SIZE, write_tokenizer
from tiny_hf import logits_of, random_tokens, save
from tiny_qwen35 import qwen35
from together import arriving_together

import pocket_cpp_core
from pocket_backend.api import EngineArgs, EngineError, SamplingParams
from pocket_backend.cli.main import main
from pocket_backend.core.step import ExecuteRequest
from pocket_backend.engine.llm import LLM
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.cpp_engine import CppEngineBackend

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def model() -> Any:
    return qwen35()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save(model, tmp_path_factory.mktemp("qwen35"))


def pairs(*values: int) -> list[np.ndarray]:
    return [np.array([value], dtype=np.int32) for value in values]


def test_a_snapshot_continues_as_its_sequence_does(directory):
    """Two slots share the blocks of a prefix, as forks and prefix hits do."""
    tokens, other = random_tokens(50), random_tokens(9, seed=3)
    driver = exact(directory, rows=2, state_snapshots=2)
    driver.tables[1, :2] = driver.tables[0, :2]
    driver.logits(Part(tokens[:32], 0, 0))
    driver.engine.save_states(*pairs(0, 1))
    expected = driver.logits(Part(tokens[32:], 32, 0, range(18)))
    branch = exact(directory).all_logits(tokens[:32] + other)[32:]
    for slot in (1, 0):
        driver.engine.load_states(*pairs(1, slot))
        assert np.array_equal(driver.logits(Part(other, 32, slot, range(9))), branch)
        driver.engine.load_states(*pairs(1, slot))
        assert np.array_equal(driver.logits(Part(tokens[32:], 32, slot, range(18))), expected)


def test_a_step_that_does_not_continue_the_state_is_refused(directory):
    driver = exact(directory, rows=2, state_snapshots=1)
    tokens = random_tokens(20)
    driver.logits(Part(tokens, 0, 0))
    for part, message in (
        (Part(tokens[:1], 16, 0), "slot 0 holds the recurrent state after 20 tokens and the sequ"),
        (Part(tokens[:1], 20, 1), "slot 1 holds no recurrent state"),
    ):
        with pytest.raises(pocket_cpp_core.InvalidArgument) as caught:
            driver.logits(part)
        assert message in str(caught.value)
    with pytest.raises(pocket_cpp_core.InvalidArgument, match="snapshot 0 holds no state"):
        driver.engine.load_states(*pairs(0, 0))
    with pytest.raises(pocket_cpp_core.InvalidArgument, match="snapshot: got 1; there are 1"):
        driver.engine.save_states(*pairs(0, 1))
    driver.logits(Part(tokens[:1], 20, 0))  # what was refused has changed nothing


# --- through the engine: prefix cache, preemption, forks ------------------------------------------

NEW = 12


def prompts() -> list[list[int]]:
    stem = random_tokens(40, seed=3)
    return [stem[:n] + random_tokens(3, seed=n + i) for i, n in enumerate((0, 17, 32, 40, 40))]


def generate(directory: Any, params: SamplingParams, **options: Any) -> tuple[list[Any], Any]:
    exact = {"precision": "f32", "kv_cache_dtype": "f32", "threads": 2}
    engine = UnifiedEngine(CppEngineBackend(directory, exact | options), max_total_tokens=1 << 20)
    try:
        with arriving_together(engine, len(prompts())):
            results = LLM(engine=engine).generate(prompts(), params)
        return [list(result.token_ids) for result in results], engine.stats()
    finally:
        engine.close()


def test_an_llm_generates_what_transformers_generates(tmp_path, model, directory):
    """At positions 0, 20 and 200, the longest prompt in chunks of 64 tokens."""
    for file in directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    write_tokenizer(tmp_path)
    asked = [random_tokens(length, length, TOKENIZER_SIZE) for length in (1, 20, 200)]
    args = EngineArgs(
        model=str(tmp_path),
        backend="cpp",
        precision="f32",
        kv_cache_dtype="f32",
        max_num_batched_tokens=64,
        backend_options={"max_state_snapshots": 3},
    )
    with LLM(args) as llm:
        memory = llm.engine.memory_info
        results = llm.generate(asked, SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert memory.state_bytes == pocket_cpp_core.inspect_model(directory)["state_bytes"] > 0
    assert (memory.num_state_snapshots, memory.state_snapshot_interval) == (3, 512)
    for tokens, result in zip(asked, results, strict=True):
        found = list(result.token_ids)
        best = logits_of(model, tokens + found[:-1])[len(tokens) - 1 :, :TOKENIZER_SIZE].argmax(
            axis=1
        )
        assert found == best.tolist()


@pytest.mark.parametrize("snapshots", [0, 1, 6])
@pytest.mark.parametrize("precision", ["f32", "int8"])
def test_prefix_hits_preemption_and_forks_change_no_token(directory, precision, snapshots):
    params = SamplingParams(max_tokens=30, ignore_eos=True, n=2, temperature=0.8, seed=5)
    expected, alone = generate(
        directory, params, precision=precision, max_batch_size=1, max_state_snapshots=0
    )
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    got, stats = generate(
        directory,
        params,
        precision=precision,
        max_batch_size=4,
        max_batch_tokens=24,
        num_blocks=6,
        max_state_snapshots=snapshots,
        state_snapshot_interval_tokens=16,
    )
    assert got == expected
    assert stats.preemptions
    assert not alone.prefix_hit_tokens
    assert (stats.prefix_hit_tokens > 0) == (snapshots > 0)


def request(tokens: list[int], start: int = 0, slot: int = 0, **fields: Any) -> ExecuteRequest:
    """A part of a sequence in ``slot``, whose blocks are 4 * slot .. 4 * slot + 3."""
    made = ExecuteRequest(
        f"r{slot}",
        tuple(tokens),
        slot,
        is_prefill=len(tokens) > 1,
        sampling_params=SamplingParams(),
        start_position=start,
        is_new=start == 0,
        block_ids=tuple(range(4 * slot, 4 * slot + 4)) if start == 0 else (),
    )
    return replace(made, **fields)


def test_a_state_is_loaded_before_its_place_is_written(directory):
    backend = CppEngineBackend(directory, {"num_blocks": 32, "max_state_snapshots": 1})
    assert backend.supports_feature("recurrent_state")
    prompt = prompts()[3][:20]
    try:
        [whole] = backend.execute_model([request(prompt)])
        backend.execute_model([request(prompt[:16], slot=1, samples=False, state_target=0)])
        [rest] = backend.execute_model([request(prompt[16:], 16, slot=1)])
        assert rest.token_id == whole.token_id
        # Resumed in another slot over the same blocks, while a third overwrites the snapshot.
        resumed = request(
            prompt[16:], 16, slot=2, is_new=True, block_ids=(4, 8, 9, 10), state_source=0
        )
        other = request(prompts()[4][:16], slot=3, state_target=0)
        outputs = backend.execute_model([other, resumed])
        assert outputs[1].token_id == whole.token_id
        # A new sequence starts from zero whatever the slot held.
        [again] = backend.execute_model([request(prompt)])
        assert again.token_id == whole.token_id
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_source": 1}, "snapshot: got 1; there are 1"),
        ({"state_target": -1}, "snapshot: got -1; there are 1"),
        ({"start_position": 16}, "slot 0 holds no recurrent state"),
    ],
)
def test_broken_contracts_fail_the_step(directory, fields, message):
    backend = CppEngineBackend(directory, {"num_blocks": 8, "max_state_snapshots": 1})
    try:
        with pytest.raises(EngineError, match=message):
            backend.execute_model([request([5, 6], **fields)])
    finally:
        backend.close()


def test_inspect_counts_states(directory, capsys):
    assert main(["inspect", str(directory), "-b", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    state = pocket_cpp_core.inspect_model(directory)["state_bytes"]
    assert found["serving"]["backend"] == "cpp"
    assert found["serving"]["state_bytes"] == state
    memory = found["memory_bytes"]
    assert memory["state"] == 3 * state
    assert memory["total"] == sum(memory[key] for key in ("weights", "kv", "state", "process"))
    assert memory["kv_per_token"] == 2 * 2 * 32 * 2  # of the one layer with attention


def test_the_native_slots_of_the_older_api_refuse_recurrent_models(directory):
    """Their prefix cache shares KV blocks, which without a state at their end are of no use."""
    with pytest.raises(pocket_cpp_core.UnsupportedFeatureError) as caught:
        pocket_cpp_core.QwenEngine(directory, pocket_cpp_core.QwenEngineOptions())
    assert "architecture qwen35" in str(caught.value)
    assert "recurrent state" in str(caught.value)
