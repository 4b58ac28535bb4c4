"""Mixtral in the C++ engine against Transformers, on tiny random weights.

Its experts are computed by the layer that test_expert_models.py holds to Transformers; here is what
is Mixtral's own: names, sizes and, in GGUF files, an architecture that it shares with Llama.
Tolerances as there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_parity import TOKENS, check_logits, check_rows, exact
from safetensors.torch import load_file, save_file
from tiny_experts import mixtral, stacked_weights, write_gguf
from tiny_hf import edit_config, random_tokens, save

import pocket_cpp_core
from pocket_backend.api import EngineArgs
from pocket_backend.cli.main import main
from pocket_backend.executors.registry import choose_backend

pytestmark = pytest.mark.parity

ISAS = pocket_cpp_core.build_info()["isas"]
CASES: dict[str, dict[str, Any]] = {
    "some experts": {},
    "all experts, tied, one key head": {
        "num_experts_per_tok": 7,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "sliding, wide heads": {"sliding_window": 37, "head_dim": 32},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return mixtral()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("mixtral"))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path, name):
    model = mixtral(**CASES[name])
    check_logits(save(model, tmp_path), model)


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_of_the_same_weights_gives_the_same_bits(tmp_path, name):
    model = mixtral(**CASES[name])
    directory, file = save(model, tmp_path / "directory"), tmp_path / "model.gguf"
    if model.config.tie_word_embeddings:
        del model.lm_head
    write_gguf(file, model)
    assert pocket_cpp_core.inspect_model(file)["architecture"] == "llama"
    tokens = random_tokens(60)
    assert np.array_equal(exact(file).all_logits(tokens), exact(directory).all_logits(tokens))


@pytest.mark.parametrize("weight_format", ["Q8_0", "Q4_1", "F16"])
def test_formats_of_gguf_files(tmp_path, model, weight_format):
    model = mixtral()
    write_gguf(tmp_path / "model.gguf", model, weight_format)
    check_logits(tmp_path / "model.gguf", model)


def test_names_of_transformers_5_are_the_same_bits(tmp_path, model, directory):
    """Published files name the block by what Mixtral called it, and its experts' parts w1 to w3."""
    names = load_file(directory / "model.safetensors").keys()
    assert "model.layers.1.block_sparse_moe.experts.6.w3.weight" in names
    stacks = stacked_weights(model)
    assert "model.layers.1.mlp.experts.gate_up_proj" in stacks
    save_file(stacks, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    tokens = random_tokens(60)
    assert np.array_equal(exact(tmp_path).all_logits(tokens), exact(directory).all_logits(tokens))


@pytest.mark.parametrize("weights", [None, "q8_0", "q4_0"])
def test_rows_do_not_depend_on_their_step(directory, weights):
    check_rows(directory, isas=ISAS, weights=weights)


@pytest.mark.parametrize("part", ["gate", "experts.0.w1", "experts.6.w3", "experts.3.w2"])
def test_no_weight_is_ignored(tmp_path, directory, part):
    weights = load_file(directory / "model.safetensors")
    weights[f"model.layers.1.block_sparse_moe.{part}.weight"][0] += 0.5
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    tokens = random_tokens(TOKENS)
    difference = exact(tmp_path).all_logits(tokens) - exact(directory).all_logits(tokens)
    assert np.abs(difference).max() > 0.01


def test_fields_that_files_leave_out_have_transformers_defaults(tmp_path):
    from transformers import MixtralConfig

    default = MixtralConfig()
    model = mixtral(
        rope_parameters={"rope_type": "default", "rope_theta": default.default_theta},
        rms_norm_eps=default.rms_norm_eps,
    )
    directory = save(model, tmp_path)
    tokens = random_tokens(60)
    expected = exact(directory).all_logits(tokens)
    edit_config(directory, rope_parameters=None, rms_norm_eps=None)
    assert np.array_equal(exact(directory).all_logits(tokens), expected)


def test_the_engine_is_chosen_and_described(tmp_path, model, directory, capsys):
    file = tmp_path / "model.gguf"
    write_gguf(file, model, "F32")
    for path in (directory, file):
        assert choose_backend(EngineArgs(model=str(path))).name == "cpp"
        info = pocket_cpp_core.inspect_model(path)
        assert (info["experts"], info["experts_used"]) == (7, 3)
        assert main(["inspect", "--json", str(path)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["parameters"] == sum(values.numel() for values in model.parameters())
        assert found["parameters"] - found["active_parameters"] == 2 * 4 * 3 * 96 * 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_local_experts": None}, "num_experts is missing"),
        ({"num_experts_per_tok": 8}, "expert_used_count (8) must be at most expert_count (7)"),
        ({"intermediate_size": 64}, "ffn_gate.0.weight has shape [96, 64]; expected [64, 64]"),
        ({"model_type": "llama"}, "blk.0.ffn_gate.weight is missing"),
        ({"model_type": "phimoe"}, "model_type: got 'phimoe'; supported"),
    ],
)
def test_directories_that_are_refused(tmp_path, directory, fields, message):
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    edit_config(tmp_path, **fields)
    with pytest.raises((pocket_cpp_core.Unsupported, pocket_cpp_core.ModelFileError)) as caught:
        exact(tmp_path)
    assert message in str(caught.value)
