"""Qwen3.5 (Gated DeltaNet and gated attention) in the C++ engine against Transformers.

As in test_hf_models.py: tiny random weights, float32 on both sides, 2e-4 at every position.
States and snapshots are in test_qwen35_states.py.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import Driver
from hf_parity import TOLERANCE, check_logits, check_rows, exact
from safetensors.torch import load_file, save_file
from tiny_hf import edit_config, random_tokens, save, tiny_model
from tiny_qwen35 import FIELDS, LINEAR, qwen35, write_gguf

import pocket_cpp_core

pytestmark = pytest.mark.parity

CASES: dict[str, dict[str, Any]] = {
    "three value heads per key head": FIELDS,
    "one value head per key head, tied, a wider convolution, narrow values": FIELDS
    | {
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 48,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 6,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "the default pattern, half of a head rotates": FIELDS
    | {
        "num_hidden_layers": 5,
        "layer_types": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
}


@pytest.fixture(scope="module")
def model() -> Any:
    return qwen35()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save(model, tmp_path_factory.mktemp("qwen35"))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path, name):
    model = tiny_model("Qwen3_5TextConfig", **CASES[name])
    check_logits(save(model, tmp_path), model)


@pytest.mark.parametrize("weights", [None, "q8_0"])
def test_rows_do_not_depend_on_their_step(directory, weights):
    check_rows(directory, weights=weights)


def test_instruction_sets_give_the_same_bits(directory):
    tokens = random_tokens(40)
    found = [Driver(directory, isa=isa).all_logits(tokens) for isa in ("scalar", None)]
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("layer", "part"),
    [
        (0, "linear_attn.A_log"),
        (0, "linear_attn.dt_bias"),
        (0, "linear_attn.conv1d.weight"),
        (0, "linear_attn.norm.weight"),
        (0, "linear_attn.in_proj_z.weight"),
        (0, "linear_attn.in_proj_a.weight"),
        (0, "linear_attn.in_proj_b.weight"),
        (1, "self_attn.q_proj.weight"),
        (1, "self_attn.q_norm.weight"),
    ],
)
def test_no_weight_is_ignored(tmp_path, directory, layer, part):
    """Half of the weight changes (for q_proj: the gates of the last head)."""
    file = tmp_path / "model.safetensors"
    weights = load_file(directory / "model.safetensors")
    changed = weights[f"model.layers.{layer}.{part}"]
    changed[len(changed) - max(1, len(changed) // 8) :] += 0.5
    save_file(weights, file)
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    tokens = random_tokens(30)
    assert (
        np.abs(exact(tmp_path).all_logits(tokens) - exact(directory).all_logits(tokens)).max()
        > 0.01
    )


def test_a_multimodal_checkpoint_is_its_text_model(tmp_path, directory):
    """Nested configuration, prefixed names; vision tower and MTP layers are left out."""
    weights = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in load_file(directory / "model.safetensors").items()
    }
    weights["model.visual.patch_embed.proj.weight"] = torch.ones(2, 2)
    weights["mtp.fc.weight"] = torch.ones(2, 2)
    save_file(weights, tmp_path / "model.safetensors")
    text = json.loads((directory / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "vision_config": {}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tokens = random_tokens(30)
    assert np.array_equal(exact(tmp_path).all_logits(tokens), exact(directory).all_logits(tokens))
    info = pocket_cpp_core.inspect_model(tmp_path)
    assert (info["layers"], info["attention_layers"]) == (3, 1)
    width = 2 * 2 * 16 + 6 * 32
    assert info["state_bytes"] == 2 * (3 * width + 6 * 16 * 32) * 4
    assert info["kv_bytes_per_block"] == 16 * 2 * 2 * 32 * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": [LINEAR, "sliding_attention", LINEAR]}, "layer_types: got 'sliding_att"),
        ({"layer_types": [LINEAR]}, "layer_types: has 1 entries; must have one for each of the 3"),
        ({"layer_types": [LINEAR] * 3}, "all layers are recurrent"),
        ({"linear_num_value_heads": 5}, "must be a multiple of ssm.group_count (2)"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim is missing"),
        ({"linear_conv_kernel_dim": 9}, "ssm.conv_kernel: got 9; must be from 1 to 8"),
        ({"attn_output_gate": False}, "attn_output_gate: got false"),
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


def test_a_gguf_file_gives_the_same_logits(tmp_path, model, directory):
    """Not the same bits: the sum over value heads comes in another order."""
    write_gguf(tmp_path / "model.gguf", model)
    tokens = random_tokens(60)
    got = exact(tmp_path / "model.gguf").all_logits(tokens)
    assert np.abs(got - exact(directory).all_logits(tokens)).max() < TOLERANCE
