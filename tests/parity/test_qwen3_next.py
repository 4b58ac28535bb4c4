"""Qwen3-Next in the C++ engine against Transformers, on tiny random weights.

It is Qwen3.5-MoE in another layout (its files keep the projections of Gated DeltaNet fused, key
head by key head), with dense layers, and weights of experts that need not add up to one. Tolerances
as in hf_parity.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import Part
from hf_parity import check_logits, check_rows, exact
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TOKENIZER_SIZE, write_tokenizer
from tiny_experts import stacked_weights
from tiny_hf import edit_config, logits_of, random_tokens, save
from tiny_qwen35 import FULL, LINEAR, qwen3_next, write_gguf

import pocket_cpp_core
from pocket_backend.api import EngineArgs, SamplingParams
from pocket_backend.cli.main import main
from pocket_backend.engine.llm import LLM
from pocket_backend.executors.registry import choose_backend

pytestmark = pytest.mark.parity

ISAS = pocket_cpp_core.build_info()["isas"]
CASES: dict[str, dict[str, Any]] = {
    "three value heads per key head": {},
    "one value head per key head, tied, narrow values": {
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 48,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "the default pattern, one layer dense, weights as they are": {
        "num_hidden_layers": 5,
        "layer_types": None,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "every other layer with experts": {
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, FULL, FULL, LINEAR],
        "decoder_sparse_step": 2,
        "num_experts_per_tok": 7,
    },
}


@pytest.fixture(scope="module")
def model() -> Any:
    return qwen3_next()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("qwen3next"))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path, name):
    model = qwen3_next(**CASES[name])
    check_logits(save(model, tmp_path), model)


@pytest.mark.parametrize("weights", [None, "q8_0", "q4_0"])
def test_rows_do_not_depend_on_their_step(directory, weights):
    check_rows(directory, isas=ISAS, weights=weights)


@pytest.mark.parametrize("split", [True, False], ids=["attn_qkv", "ssm_in"])
@pytest.mark.parametrize("name", list(CASES)[:2])
def test_a_gguf_file_gives_the_same_bits(tmp_path, name, split):
    """As today's converters write it, and as older ones did. Value heads are in the same order."""
    fields = CASES[name] | {"layer_types": [LINEAR, FULL, LINEAR]}
    model = qwen3_next(**fields)
    directory, file = save(model, tmp_path / "directory"), tmp_path / "model.gguf"
    if model.config.tie_word_embeddings:
        del model.lm_head
    write_gguf(file, model, split=split)
    tokens = random_tokens(60)
    assert np.array_equal(exact(file).all_logits(tokens), exact(directory).all_logits(tokens))
    assert pocket_cpp_core.inspect_model(file)["architecture"] == "qwen3next"


def test_stacks_of_experts_are_the_same_bits(tmp_path, model, directory):
    """And layers that predict further tokens are left out."""
    weights = stacked_weights(model)
    assert "model.layers.1.mlp.experts.gate_up_proj" in weights
    weights["mtp.fc.weight"] = torch.ones(2, 2)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    tokens = random_tokens(30)
    assert np.array_equal(exact(tmp_path).all_logits(tokens), exact(directory).all_logits(tokens))


@pytest.mark.parametrize(
    ("layer", "part", "rows"),
    [
        # of one key head: q, k, three values, three gates; of the last: beta, alpha
        (0, "linear_attn.in_proj_qkvz.weight", slice(0, 16)),
        (0, "linear_attn.in_proj_qkvz.weight", slice(16, 32)),
        (0, "linear_attn.in_proj_qkvz.weight", slice(96, 128)),
        (0, "linear_attn.in_proj_qkvz.weight", slice(-96, -64)),
        (0, "linear_attn.in_proj_ba.weight", slice(6, 9)),
        (0, "linear_attn.in_proj_ba.weight", slice(9, 12)),
        (0, "linear_attn.A_log", slice(-1, None)),
        (0, "linear_attn.dt_bias", slice(-1, None)),
        (0, "linear_attn.conv1d.weight", slice(-9, None)),
        (0, "linear_attn.norm.weight", slice(-9, None)),
        (0, "mlp.shared_expert_gate.weight", slice(0, 1)),
        (1, "mlp.gate.weight", slice(0, 1)),
        (1, "mlp.shared_expert.up_proj.weight", slice(0, 9)),
        (1, "self_attn.q_proj.weight", slice(-32, None)),
        (1, "self_attn.k_norm.weight", slice(0, 9)),
    ],
)
def test_no_weight_is_ignored(tmp_path, directory, layer, part, rows):
    weights = load_file(directory / "model.safetensors")
    weights[f"model.layers.{layer}.{part}"][rows] += 0.5
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    tokens = random_tokens(60)
    difference = exact(tmp_path).all_logits(tokens) - exact(directory).all_logits(tokens)
    assert np.abs(difference).max() > 0.01


def test_norm_topk_prob_is_true_where_the_file_leaves_it_out(tmp_path):
    directory = save(qwen3_next(), tmp_path)
    tokens = random_tokens(30)
    expected = exact(directory).all_logits(tokens)
    edit_config(directory, norm_topk_prob=None)
    assert np.array_equal(exact(directory).all_logits(tokens), expected)
    edit_config(directory, norm_topk_prob=False)
    assert np.abs(exact(directory).all_logits(tokens) - expected).max() > 0.01


def test_a_snapshot_continues_as_its_sequence_does(directory):
    tokens, other = random_tokens(50), random_tokens(9, seed=3)
    driver = exact(directory, rows=2, state_snapshots=2)
    driver.tables[1, :2] = driver.tables[0, :2]
    driver.logits(Part(tokens[:32], 0, 0))
    slot, snapshot = np.array([0], dtype=np.int32), np.array([1], dtype=np.int32)
    driver.engine.save_states(slot, snapshot)
    expected = driver.logits(Part(tokens[32:], 32, 0, range(18)))
    branch = exact(directory).all_logits(tokens[:32] + other)[32:]
    for row in (1, 0):
        driver.engine.load_states(snapshot, np.array([row], dtype=np.int32))
        assert np.array_equal(driver.logits(Part(other, 32, row, range(9))), branch)
        driver.engine.load_states(snapshot, np.array([row], dtype=np.int32))
        assert np.array_equal(driver.logits(Part(tokens[32:], 32, row, range(18))), expected)


def test_the_engine_is_chosen_described_and_generates(tmp_path, model, directory, capsys):
    for file in directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    write_tokenizer(tmp_path)
    assert choose_backend(EngineArgs(model=str(tmp_path))).name == "cpp"
    info = pocket_cpp_core.inspect_model(tmp_path)
    assert (info["experts"], info["experts_used"], info["attention_layers"]) == (7, 3, 1)
    assert info["state_bytes"] > 0
    assert main(["inspect", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["serving"]["backend"] == "cpp"
    assert found["parameters"] - found["active_parameters"] == 3 * 4 * 3 * 32 * 64
    asked = [random_tokens(length, length, TOKENIZER_SIZE) for length in (1, 20, 200)]
    args = EngineArgs(
        model=str(tmp_path), precision="f32", kv_cache_dtype="f32", max_num_batched_tokens=64
    )
    with LLM(args) as llm:
        results = llm.generate(asked, SamplingParams(max_tokens=12, ignore_eos=True))
    for tokens, result in zip(asked, results, strict=True):
        got = list(result.token_ids)
        logits = logits_of(model, tokens + got[:-1])[len(tokens) - 1 :, :TOKENIZER_SIZE]
        assert got == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ({"linear_num_value_heads": 5}, "must be a multiple of ssm.group_count (2)"),
        ({"linear_num_value_heads": 4}, "blk.0.ssm_in.weight has shape [448, 64]; expected [320"),
        ({"mlp_only_layers": [1]}, "blk.1.ffn_gate.weight is missing"),
        ({"layer_types": [LINEAR] * 3}, "all layers are recurrent"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
    ],
)
def test_fields_that_are_refused(tmp_path, directory, fields, message):
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    edit_config(tmp_path, **fields)
    with pytest.raises((pocket_cpp_core.Unsupported, pocket_cpp_core.ModelFileError)) as caught:
        exact(tmp_path)
    assert message in str(caught.value)
