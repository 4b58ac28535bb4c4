"""Qwen3.5-MoE in the C++ engine against Transformers: its parts are held to it one by one in
test_qwen35.py and test_expert_models.py, here they are together. Tolerances as there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_parity import TOLERANCE, check_logits, check_rows, exact
from safetensors.torch import load_file, save_file
from tiny_experts import stacked_weights
from tiny_hf import edit_config, random_tokens, save
from tiny_qwen35 import FULL, LINEAR, qwen35_moe, write_gguf

import pocket_cpp_core
from pocket_backend.api import EngineArgs
from pocket_backend.executors.registry import choose_backend

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def model() -> Any:
    return qwen35_moe()


@pytest.fixture(scope="module")
def directory(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("qwen35moe"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "layer_types": [FULL, LINEAR, FULL],
            "num_experts_per_tok": 7,
            "tie_word_embeddings": True,
        },
    ],
    ids=["some", "all experts, tied"],
)
def test_logits_equal_transformers(tmp_path, fields):
    model = qwen35_moe(**fields)
    check_logits(save(model, tmp_path), model)


@pytest.mark.parametrize("weights", [None, "q8_0"])
def test_rows_do_not_depend_on_their_step(directory, weights):
    check_rows(directory, weights=weights)


def test_a_gguf_file_gives_the_same_logits(tmp_path, model, directory):
    """Not the same bits: the sum over value heads comes in another order."""
    write_gguf(tmp_path / "model.gguf", model)
    tokens = random_tokens(60)
    got = exact(tmp_path / "model.gguf").all_logits(tokens)
    assert np.abs(got - exact(directory).all_logits(tokens)).max() < TOLERANCE
    assert pocket_cpp_core.inspect_model(tmp_path / "model.gguf")["architecture"] == "qwen35moe"


@pytest.mark.parametrize("stacks", [True, False])
def test_a_multimodal_checkpoint_is_its_text_model(tmp_path, model, directory, stacks):
    """Published files hold stacks; nested configuration, prefixed names, parts left out."""
    weights = stacked_weights(model) if stacks else load_file(directory / "model.safetensors")
    weights = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in weights.items()
    }
    weights["model.visual.patch_embed.proj.weight"] = torch.ones(2, 2)
    weights["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.ones(2, 2)
    save_file(weights, tmp_path / "model.safetensors")
    text = json.loads((directory / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "vision_config": {}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert choose_backend(EngineArgs(model=str(tmp_path))).name == "cpp"
    tokens = random_tokens(30)
    assert np.array_equal(exact(tmp_path).all_logits(tokens), exact(directory).all_logits(tokens))
    info = pocket_cpp_core.inspect_model(tmp_path)
    assert (info["experts"], info["experts_used"], info["attention_layers"]) == (7, 3, 1)
    assert info["state_bytes"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ({"num_experts_per_tok": 9}, "expert_used_count (9) must be at most expert_count (7)"),
        ({"model_type": "qwen3_5_text"}, "intermediate_size is missing"),
    ],
)
def test_fields_that_are_refused(tmp_path, directory, fields, message):
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    edit_config(tmp_path, intermediate_size=None)
    edit_config(tmp_path, **fields)
    with pytest.raises((pocket_cpp_core.Unsupported, pocket_cpp_core.ModelFileError)) as caught:
        exact(tmp_path)
    assert message in str(caught.value)
