"""Hugging Face directories of every architecture against Transformers, on tiny random weights.

Float weights, float activations and float KV on both sides: what is left is the order of float32
additions. Logits have a standard deviation of about 1 to 3; 2e-4 holds at every position, alone
and across chunk boundaries.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_names import GEMMA_NORMS, gguf_name
from hf_parity import TOKENS, TOLERANCE, check_logits, check_rows, exact
from safetensors.torch import load_file, save_file
from tiny_hf import CONTEXT, edit_config, logits_of, random_tokens, save, tiny_model

import pocket_cpp_core

pytestmark = pytest.mark.parity

SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Case:
    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    tokens: int = TOKENS

    def model(self) -> Any:
        return tiny_model(self.config, self.seed, **self.fields)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
GEMMA3 = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "sliding_window": 37,
    "query_pre_attn_scalar": 20,
    "layer_types": [SLIDING, "full_attention", SLIDING],
}
CASES = {
    "llama": Case("LlamaConfig"),
    "llama tied": Case("LlamaConfig", {"tie_word_embeddings": True}),
    "llama head_dim": Case("LlamaConfig", {"head_dim": 32}),
    "llama linear rope": Case(
        "LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4}}
    ),
    "llama llama3 rope": Case("LlamaConfig", {"head_dim": 32, "rope_parameters": LLAMA3_ROPE}),
    "llama yarn rope": Case("LlamaConfig", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "llama yarn attention_factor": Case(
        "LlamaConfig",
        {"head_dim": 32, "rope_parameters": YARN_ROPE | {"attention_factor": 0.8, "beta_fast": 8}},
    ),
    "mistral": Case("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "mistral with a window beyond its context": Case("MistralConfig", {"sliding_window": CONTEXT}),
    "mistral sliding": Case("MistralConfig", {"sliding_window": 37, "head_dim": 32}),
    # Attention adds up splits of 256 positions: the window leaves the first one, then ends in it.
    "mistral sliding over splits": Case("MistralConfig", {"sliding_window": 150}, tokens=420),
    "qwen2": Case("Qwen2Config"),
    "qwen2 tied, one kv head": Case(
        "Qwen2Config", {"tie_word_embeddings": True, "num_key_value_heads": 1}
    ),
    "qwen2 sliding": Case(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 1}
    ),
    "qwen3": Case("Qwen3Config", {"head_dim": 32}),
    "qwen3 sliding": Case(
        "Qwen3Config",
        {
            "use_sliding_window": True,
            "sliding_window": 50,
            "layer_types": [SLIDING, "full_attention"],
        },
    ),
    "qwen3 yarn rope": Case("Qwen3Config", {"head_dim": 32, "rope_parameters": YARN_ROPE}),
    "gemma3": Case("Gemma3TextConfig", GEMMA3),
    "gemma3 tied, linear rope in full layers": Case(
        "Gemma3TextConfig",
        GEMMA3
        | {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma3 with the default pattern": Case(
        "Gemma3TextConfig",
        {"num_hidden_layers": 7, "sliding_window": 150, "head_dim": 64},
        tokens=420,
    ),
    "llama yarn mscale": Case(
        "LlamaConfig", {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.2}}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path, name):
    model = CASES[name].model()
    check_logits(save(model, tmp_path), model, CASES[name].tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_exact(tmp_path, dtype):
    model = CASES["llama"].model()
    directory = save(model, tmp_path, dtype)
    tokens = random_tokens(TOKENS)
    assert np.abs(exact(directory).all_logits(tokens) - logits_of(model, tokens)).max() < TOLERANCE


@pytest.mark.parametrize("scaling", [LLAMA3_ROPE, YARN_ROPE], ids=lambda rope: rope["rope_type"])
def test_the_older_rope_fields_mean_the_same(tmp_path, scaling):
    """Transformers 4 wrote rope_theta and rope_scaling, and called its type "type" before that."""
    model = tiny_model("LlamaConfig", head_dim=32, rope_parameters=scaling)
    directory = save(model, tmp_path)
    expected = exact(directory).all_logits(random_tokens(TOKENS))
    old = dict(scaling)
    theta, kind = old.pop("rope_theta"), old.pop("rope_type")
    edit_config(
        directory, rope_parameters=None, rope_theta=theta, rope_scaling=old | {"type": kind}
    )
    assert np.array_equal(exact(directory).all_logits(random_tokens(TOKENS)), expected)


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", "mistral", "mistral sliding", "qwen2 sliding", "gemma3"]
)
@pytest.mark.parametrize("weights", [None, "q8_0"])
def test_rows_do_not_depend_on_their_step(tmp_path, name, weights):
    check_rows(save(CASES[name].model(), tmp_path), weights=weights)


def write_as_gguf(path, architecture: str, model: Any, *, pattern: int | None = None) -> None:
    """``pattern``: the period of sliding layers, 0 for no key; None: a list of the layers."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_value_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    gemma = architecture == "gemma3"
    if gemma:
        ropes = config.rope_parameters
        writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        layers = [kind == SLIDING for kind in config.layer_types]
        if pattern != 0:
            writer.add_sliding_window_pattern(pattern or layers)
    for name, values in model.state_dict().items():
        target = gguf_name(name, GEMMA_NORMS if gemma else {})
        # GGUF files keep Gemma's norms around one.
        writer.add_tensor(target, values.numpy() + np.float32(gemma and "norm" in name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2 sliding", "gemma3"])
def test_a_gguf_file_of_the_same_weights_gives_the_same_bits(tmp_path, name):
    model = CASES[name].model()
    directory, file = save(model, tmp_path / name), tmp_path / "model.gguf"
    write_as_gguf(file, model.config.model_type.removesuffix("_text"), model)
    tokens = random_tokens(60)
    assert np.array_equal(exact(file).all_logits(tokens), exact(directory).all_logits(tokens))


@pytest.mark.parametrize("pattern", [0, 6])
def test_gemma3_files_name_their_layers_briefly_or_not_at_all(tmp_path, pattern):
    model = CASES["gemma3 with the default pattern"].model()
    directory, file = save(model, tmp_path / "directory"), tmp_path / "model.gguf"
    write_as_gguf(file, "gemma3", model, pattern=pattern)
    tokens = random_tokens(200)
    assert np.array_equal(exact(file).all_logits(tokens), exact(directory).all_logits(tokens))


@pytest.mark.parametrize("bias", ["q_proj", "k_proj", "v_proj"])
def test_biases_are_not_ignored(tmp_path, bias):
    model = CASES["qwen2"].model()
    expected = logits_of(model, random_tokens(TOKENS))
    with torch.no_grad():
        getattr(model.model.layers[0].self_attn, bias).bias += 1.0
    got = exact(save(model, tmp_path)).all_logits(random_tokens(TOKENS))
    assert np.abs(got - logits_of(model, random_tokens(TOKENS))).max() < TOLERANCE
    # A bias on k shifts every score of a query alike, before RoPE: it shows, but less.
    assert np.abs(got - expected).max() > 1e-2


def test_a_window_hides_what_lies_before_it_and_nothing_else(tmp_path):
    directory = save(CASES["mistral sliding"].model(), tmp_path)
    tokens = random_tokens(TOKENS)
    sliding = exact(directory).all_logits(tokens)
    edit_config(directory, sliding_window=None)
    full = exact(directory).all_logits(tokens)
    assert np.array_equal(sliding[:37], full[:37])
    assert (np.abs(sliding[37:] - full[37:]).max(axis=1) > 1e-3).all()
    edit_config(directory, sliding_window=36)
    assert not np.array_equal(exact(directory).all_logits(tokens[:37])[36], full[36])


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ([SLIDING, "chunked_attention"], "layer_types: got 'chunked_attention'; supported are"),
        ([SLIDING], "has 1 entries; must have one for each of the 2 layers"),
        (SLIDING, "layer_types is a string, must be a list"),
    ],
)
def test_layer_types_that_are_refused(tmp_path, types, message):
    directory = save(CASES["qwen2 sliding"].model(), tmp_path)
    edit_config(directory, layer_types=types)
    with pytest.raises((pocket_cpp_core.Unsupported, pocket_cpp_core.ModelFileError)) as caught:
        exact(directory)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"query_pre_attn_scalar": 25},
        {"sliding_window": 36},
        {"layer_types": [SLIDING] * 3},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e6}}},
        {"rope_parameters": None, "rope_local_base_freq": 1e6},
        {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    ids=str,
)
def test_gemma3_fields_are_not_ignored(tmp_path, fields):
    directory = save(CASES["gemma3"].model(), tmp_path)
    expected = exact(directory).all_logits(random_tokens(TOKENS))
    edit_config(directory, **fields)
    assert np.abs(exact(directory).all_logits(random_tokens(TOKENS)) - expected).max() > 1e-2


def test_gemma3_of_older_and_multimodal_files(tmp_path):
    """Transformers 4's fields, and a text model beside a vision tower: the same bits."""
    model = CASES["gemma3 with the default pattern"].model()
    directory = save(model, tmp_path)
    tokens = random_tokens(60)
    expected = exact(directory).all_logits(tokens)
    edit_config(
        directory,
        rope_parameters=None,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        layer_types=None,
        sliding_window_pattern=6,
    )
    assert np.array_equal(exact(directory).all_logits(tokens), expected)
    file = directory / "model.safetensors"
    weights = {f"language_model.{name}": values for name, values in load_file(file).items()}
    save_file(weights | {"vision_tower.patch.weight": torch.ones(2, 2)}, file)
    config = json.loads((directory / "config.json").read_text())
    outer = {"model_type": "gemma3", "vision_config": {}, "text_config": config}
    (directory / "config.json").write_text(json.dumps(outer))
    assert np.array_equal(exact(directory).all_logits(tokens), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: got 30"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: got 50"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: got true"),
        ({"hidden_activation": "relu"}, "hidden_activation: got 'relu'; supported is gelu_pytorch"),
        (
            {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2}}},
            "rope_parameters.sliding_attention.rope_type: got 'linear'; supported is default",
        ),
    ],
)
def test_gemma3_features_that_are_refused(tmp_path, fields, message):
    directory = save(CASES["gemma3"].model(), tmp_path)
    edit_config(directory, **fields)
    with pytest.raises(pocket_cpp_core.Unsupported) as caught:
        exact(directory)
    assert message in str(caught.value)


def test_rope_scaling_is_not_ignored(tmp_path):
    model = CASES["llama yarn rope"].model()
    directory = save(model, tmp_path)
    expected = logits_of(model, random_tokens(TOKENS))
    edit_config(directory, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert np.abs(exact(directory).all_logits(random_tokens(TOKENS)) - expected).max() > 0.1
