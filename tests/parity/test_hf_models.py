"""Hugging Face directories of every architecture against Transformers, on tiny random weights.

Float weights, float activations and float KV on both sides: what is left is the order of float32
additions. Logits have a standard deviation of about 1 to 3; 2e-4 holds at every position, alone
and across chunk boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import Driver
from tiny_hf import CONTEXT, edit_config, logits_of, random_tokens, save, tiny_model

pytestmark = pytest.mark.parity

TOKENS = 210


@dataclass(frozen=True)
class Case:
    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

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
    "llama yarn mscale": Case(
        "LlamaConfig", {"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.2}}
    ),
}


def exact(directory, **options: Any) -> Driver:
    return Driver(directory, context=CONTEXT, precision="f32", kv_dtype="f32", **options)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path, name):
    model = CASES[name].model()
    directory = save(model, tmp_path)
    tokens = random_tokens(TOKENS)
    expected = logits_of(model, tokens)
    assert expected.std() > 0.5
    driver = exact(directory)
    for chunk in (None, 17):
        worst = np.abs(driver.all_logits(tokens, chunk=chunk) - expected).max(axis=1)
        for position in (0, 20, 200):
            assert worst[position] < 2e-4, (chunk, position, float(worst[position]))
        assert worst.max() < 2e-4, (chunk, int(worst.argmax()), float(worst.max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_exact(tmp_path, dtype):
    model = CASES["llama"].model()
    directory = save(model, tmp_path, dtype)
    tokens = random_tokens(TOKENS)
    assert np.abs(exact(directory).all_logits(tokens) - logits_of(model, tokens)).max() < 2e-4


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


def test_rope_scaling_is_not_ignored(tmp_path):
    model = CASES["llama yarn rope"].model()
    directory = save(model, tmp_path)
    expected = logits_of(model, random_tokens(TOKENS))
    edit_config(directory, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert np.abs(exact(directory).all_logits(random_tokens(TOKENS)) - expected).max() > 0.1
