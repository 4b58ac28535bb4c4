"""Every structural feature and every format, on tiny random models, against Transformers.

Exact path: 2e-4 of logits whose standard deviation is about 3 (more in proportion where it is
larger, as with the 256 columns of K-quants); both sides are float32. Int8 path:
against Transformers whose inputs are rounded to int8 in the same way. Two layers leave no room for
the rounding of a code to be amplified as in a deep model, so what is left is a few codes that
differ by one where float32 noise moved a value across a rounding boundary: at most 5 % of the
logits' standard deviation, 0.5 % on average.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from engine_driver import Driver
from tiny_gguf import FORMATS, SUPER_BLOCK_FORMATS, TinyLlama, write_gguf

pytestmark = pytest.mark.parity

CONTEXT = 256
TOKENS = 210


def model_of(weight_format: str, **kw) -> TinyLlama:
    """A model whose rows the format's blocks divide."""
    if weight_format in SUPER_BLOCK_FORMATS:
        kw |= {"hidden": 256, "ffn": 512, "head_dim": 64}
    return TinyLlama(weight_format=weight_format, **kw)


def tokens_for(model: TinyLlama) -> list[int]:
    return np.random.default_rng(7).integers(0, model.vocab, TOKENS).tolist()


def reference(model: TinyLlama, weights, rope: dict | None = None):
    """LlamaForCausalLM with these weights (GGUF names, Hugging Face's row order)."""
    parameters = {"rope_type": "default", "rope_theta": model.rope_base} | (rope or {})
    config = transformers.LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab,
        rms_norm_eps=1e-5,
        max_position_embeddings=model.context,
        tie_word_embeddings=model.tied,
        rope_parameters=parameters,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llama = transformers.LlamaForCausalLM(config).eval()
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for name, values in weights.items():
        *block, part, _ = name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{names[part]}.weight"] = torch.tensor(values)
    missing, unexpected = llama.load_state_dict(state, strict=False)
    assert set(missing) <= ({"lm_head.weight"} if model.tied else set())
    assert not unexpected
    llama.tie_weights()
    return llama


def logits_of(llama, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return llama(torch.tensor([tokens])).logits[0].numpy()


def check_exact(path, model: TinyLlama, weights, rope: dict | None = None) -> None:
    tokens = tokens_for(model)
    expected = logits_of(reference(model, weights, rope), tokens)
    tolerance = 2e-4 * max(1.0, float(expected.std()) / 3)
    driver = Driver(path, context=CONTEXT, precision="f32", kv_dtype="f32")
    for chunk in (None, 17):
        worst = np.abs(driver.all_logits(tokens, chunk=chunk) - expected).max(axis=1)
        assert worst.max() < tolerance, (chunk, int(worst.argmax()), float(worst.max()))


@pytest.mark.parametrize("weight_format", FORMATS + SUPER_BLOCK_FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_formats_on_the_exact_path(tmp_path, weight_format, tied):
    model = model_of(weight_format, tied=tied)
    path = tmp_path / "model.gguf"
    check_exact(path, model, write_gguf(path, model))


def check_alone(path, model: TinyLlama, llama, int8_activations) -> None:
    """Tokens at position 0 against a reference that rounds alike.

    One code that float noise moves across a rounding boundary shows in that token only; in a longer
    text it would stay in the cache and move codes of every later token. So nearly all tokens agree
    to float noise, and the rest to a code's worth.
    """
    tokens = tokens_for(model)[:40]
    with int8_activations(llama), torch.no_grad():
        expected = llama(torch.tensor([[token] for token in tokens])).logits[:, 0].numpy()
    driver = Driver(path, context=CONTEXT, kv_dtype="f32")
    got = np.stack([driver.all_logits([token])[0] for token in tokens])
    worst = np.abs(got - expected).max(axis=1) / expected.std()
    assert (worst < 1e-4).mean() >= 0.75, worst
    assert worst.max() < 0.1, worst


@pytest.mark.parametrize("weight_format", ["Q5_0", "Q5_1", "IQ4_NL", *SUPER_BLOCK_FORMATS])
def test_coded_formats_on_the_int8_path(tmp_path, weight_format, int8_activations):
    model = model_of(weight_format, tied=False)
    path = tmp_path / "model.gguf"
    check_alone(path, model, reference(model, write_gguf(path, model)), int8_activations)


@pytest.mark.parametrize("weight_format", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_formats_on_the_int8_path(tmp_path, weight_format, int8_activations):
    model = TinyLlama(weight_format=weight_format, tied=False)
    path = tmp_path / "model.gguf"
    llama = reference(model, write_gguf(path, model))
    tokens = tokens_for(model)
    exact = logits_of(llama, tokens)
    if weight_format in ("F32", "F16", "BF16"):
        expected = exact  # float layouts are multiplied in float at either precision
    else:
        with int8_activations(llama):
            expected = logits_of(llama, tokens)
    got = Driver(path, context=CONTEXT, kv_dtype="f32").all_logits(tokens)
    error = np.abs(got - expected)
    assert error.max() < 0.05 * exact.std()
    assert error.mean() < 0.005 * exact.std()
    if expected is not exact:
        # The reference did round: we are several times closer to it than to the exact logits.
        assert error.mean() < 0.25 * np.abs(got - exact).mean()


def test_a_mix_of_formats_as_in_published_files(tmp_path, int8_activations):
    """Like Q4_K_M: Q4_K, with Q6_K where it matters and Q5_0 where 256 does not divide rows."""
    model = TinyLlama(hidden=256, ffn=352, head_dim=64, weight_format="Q4_K", layers=3)
    formats = {"token_embd.weight": "Q6_K"}
    for layer in range(model.layers):
        formats |= {
            f"blk.{layer}.attn_v.weight": "Q6_K" if layer else "Q5_K",
            f"blk.{layer}.ffn_down.weight": "Q5_0" if layer else "Q8_0",
        }
    path = tmp_path / "model.gguf"
    weights = write_gguf(path, model, formats=formats)
    check_exact(path, model, weights)
    check_alone(path, model, reference(model, weights), int8_activations)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(TinyLlama(heads=4, kv_heads=4), id="multi-head, one query per kv head"),
        pytest.param(TinyLlama(heads=6, kv_heads=1, hidden=96), id="multi-query"),
        pytest.param(TinyLlama(heads=6, kv_heads=2, head_dim=48, hidden=96), id="head_dim 48"),
        pytest.param(TinyLlama(heads=4, kv_heads=2, head_dim=32), id="heads wider than hidden"),
        pytest.param(TinyLlama(heads=2, kv_heads=1, head_dim=128, layers=1), id="head_dim 128"),
        pytest.param(TinyLlama(vocab=17), id="vocabulary of one panel and one row"),
        pytest.param(TinyLlama(rope_base=1e6), id="rope base"),
        pytest.param(TinyLlama(layers=4, ffn=160), id="deeper"),
    ],
)
@pytest.mark.parametrize("weight_format", ["F32", "Q4_1"])
def test_shapes_on_the_exact_path(tmp_path, model, weight_format):
    model = replace(model, weight_format=weight_format)
    path = tmp_path / "model.gguf"
    check_exact(path, model, write_gguf(path, model))


def test_head_width_that_is_no_whole_quantisation_block(tmp_path, int8_activations):
    """16 columns per kv head: two heads share a block of 32, so quantising waits for both."""
    model = TinyLlama(heads=4, kv_heads=4, weight_format="Q8_0")
    path = tmp_path / "model.gguf"
    llama = reference(model, write_gguf(path, model))
    tokens = tokens_for(model)
    with int8_activations(llama):
        expected = logits_of(llama, tokens)
    got = Driver(path, context=CONTEXT, kv_dtype="f32").all_logits(tokens)
    assert np.abs(got - expected).mean() < 0.005 * expected.std()


def test_formats_mixed_in_one_file(tmp_path):
    """Consumers of one input in integer and in float layouts, as "K_M" style files have."""
    model = TinyLlama(weight_format="Q4_0", tied=False)
    path = tmp_path / "model.gguf"
    formats = {
        "blk.0.attn_v.weight": "F16",
        "blk.0.ffn_down.weight": "F32",
        "blk.1.ffn_gate.weight": "BF16",
        "blk.1.attn_output.weight": "Q8_0",
        "output.weight": "F16",
        "blk.1.attn_norm.weight": "F16",
    }
    weights = write_gguf(path, model, formats=formats)
    check_exact(path, model, weights)
    tokens = tokens_for(model)
    exact = logits_of(reference(model, weights), tokens)
    got = Driver(path, context=CONTEXT).all_logits(tokens)
    assert np.abs(got - exact).mean() < 0.05 * exact.std()


def test_llama3_rope_factors(tmp_path):
    """rope_freqs.weight holds what Transformers computes from rope_type llama3."""
    factor, low, high, original = 8.0, 1.0, 4.0, 64
    model = TinyLlama(head_dim=32, rope_base=500.0)
    factors = []
    for pair in range(model.head_dim // 2):
        wavelength = 2 * math.pi * model.rope_base ** (2 * pair / model.head_dim)
        if wavelength > original / low:
            factors.append(factor)
        elif wavelength < original / high:
            factors.append(1.0)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    assert {1.0, factor} < set(factors)  # all three cases occur
    model = replace(model, rope_frequency_factors=tuple(factors))
    path = tmp_path / "model.gguf"
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    check_exact(path, model, write_gguf(path, model), rope)


def test_linear_rope_scaling(tmp_path):
    model = TinyLlama(rope_scaling="linear", rope_factor=4.0)
    path = tmp_path / "model.gguf"
    check_exact(path, model, write_gguf(path, model), {"rope_type": "linear", "factor": 4.0})


def test_rope_scaling_is_not_ignored(tmp_path):
    """The two tests above could pass if neither side scaled: here the sides must differ."""
    model = TinyLlama(rope_scaling="linear", rope_factor=4.0)
    path = tmp_path / "model.gguf"
    weights = write_gguf(path, model)
    tokens = tokens_for(model)
    got = Driver(path, context=CONTEXT, precision="f32", kv_dtype="f32").all_logits(tokens)
    plain = logits_of(reference(model, weights), tokens)
    assert np.abs(got[1:] - plain[1:]).max() > 0.1
