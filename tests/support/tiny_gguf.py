"""Tiny random Llama models as GGUF files: fast to compute, with every structural feature.

Needs ``gguf`` and numpy only. The weights come back as float32 in Hugging Face's row order, already
rounded to the file's format, so that a reference can load exactly what the engine reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ggml_quants
import gguf
import numpy as np
from gguf import GGMLQuantizationType as GgmlType

FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
SUPER_BLOCK_FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Their rows are multiples of 256: hidden, heads * head_dim and ffn must be."""

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class TinyLlama:
    """Shape of a model; the defaults are the smallest that exercise grouped-query attention."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    vocab: int = 333
    context: int = 512
    tied: bool = True
    rope_base: float = 10000.0
    rope_scaling: str | None = None
    rope_factor: float = 1.0
    rope_frequency_factors: tuple[float, ...] | None = None
    weight_format: str = "F32"
    seed: int = 0
    tokenizer_tokens: int | None = None
    """Entries of tokenizer.ggml.tokens; None: no tokenizer in the file."""
    byte_level: bool = False
    """Whether they make a tokenizer that loads: the bytes first, and one merge."""
    end_tokens: dict[str, int] = field(default_factory=dict)
    """eos, eot, eom -> id; written with a tokenizer only."""
    architecture: str = "llama"
    extra: dict[str, int | float | str] = field(default_factory=dict)
    """More keys, without the architecture's prefix."""


def tensor_shapes(model: TinyLlama) -> dict[str, tuple[int, ...]]:
    """GGUF names and [rows, columns] (or [n]) of all tensors."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (model.vocab, model.hidden),
        "output_norm.weight": (model.hidden,),
    }
    if not model.tied:
        shapes["output.weight"] = (model.vocab, model.hidden)
    for layer in range(model.layers):
        prefix = f"blk.{layer}."
        shapes |= {
            f"{prefix}attn_norm.weight": (model.hidden,),
            f"{prefix}attn_q.weight": (q, model.hidden),
            f"{prefix}attn_k.weight": (kv, model.hidden),
            f"{prefix}attn_v.weight": (kv, model.hidden),
            f"{prefix}attn_output.weight": (model.hidden, q),
            f"{prefix}ffn_norm.weight": (model.hidden,),
            f"{prefix}ffn_gate.weight": (model.ffn, model.hidden),
            f"{prefix}ffn_up.weight": (model.ffn, model.hidden),
            f"{prefix}ffn_down.weight": (model.hidden, model.ffn),
        }
    return shapes


def random_weights(model: TinyLlama) -> Weights:
    """Weights scaled so that activations stay near 1 and attention is neither flat nor one-hot."""
    random = np.random.default_rng(model.seed)
    weights: Weights = {}
    for name, shape in tensor_shapes(model).items():
        if len(shape) == 1:
            weights[name] = (1.0 + 0.1 * random.standard_normal(shape)).astype(np.float32)
        else:
            gain = 1.5 if "attn_q" in name or "attn_k" in name else 1.0
            scale = gain / np.sqrt(shape[1]) if name != "token_embd.weight" else 1.0
            weights[name] = (scale * random.standard_normal(shape)).astype(np.float32)
    return weights


def interleave_rope_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row order of GGUF "llama" files: the two halves of each head, pair by pair."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: TinyLlama,
    *,
    change_tensors: Callable[[Weights], Weights] | None = None,
    formats: dict[str, str] | None = None,
) -> Weights:
    """Write the model; returns its weights as the file holds them, rows in Hugging Face's order.

    Args:
        change_tensors: edits the tensors (GGUF names, Hugging Face's row order) before writing.
        formats: format per tensor name, instead of ``model.weight_format``.
    """
    writer = gguf.GGUFWriter(str(path), model.architecture)
    values: dict[str, int | float | str] = {
        "block_count": model.layers,
        "context_length": model.context,
        "embedding_length": model.hidden,
        "feed_forward_length": model.ffn,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": model.head_dim,
        "rope.freq_base": model.rope_base,
        "vocab_size": model.vocab,
    }
    if model.rope_scaling is not None:
        values |= {
            "rope.scaling.type": model.rope_scaling,
            "rope.scaling.factor": model.rope_factor,
        }
    for key, value in (values | model.extra).items():
        name = f"{model.architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    if model.tokenizer_tokens is not None:
        writer.add_tokenizer_model("gpt2")
        pieces = [f"t{i}" for i in range(model.tokenizer_tokens)]
        if model.byte_level:
            from tokenizers.pre_tokenizers import ByteLevel

            alphabet = [*sorted(ByteLevel.alphabet()), "ab"]
            pieces[: len(alphabet)] = alphabet
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_merges(["a b"])
        writer.add_token_list(pieces)
        for name, token in model.end_tokens.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)

    weights = random_weights(model)
    if change_tensors is not None:
        weights = change_tensors(weights)
    stored: Weights = {}
    for name, values_f32 in weights.items():
        matrix = values_f32.ndim == 2
        kind = GgmlType[(formats or {}).get(name, model.weight_format if matrix else "F32")]
        if kind.name in ggml_quants.FORMATS:
            packed = ggml_quants.quantize(values_f32, kind.name)
        else:
            packed = gguf.quants.quantize(values_f32, kind)
        stored[name] = gguf.quants.dequantize(packed, kind).reshape(values_f32.shape)
        heads = {"attn_q": model.heads, "attn_k": model.kv_heads}
        for part, count in heads.items():
            if part in name and model.architecture == "llama":
                packed = interleave_rope_rows(packed, count)
        writer.add_tensor(name, packed, raw_dtype=kind)
    if model.rope_frequency_factors is not None:
        writer.add_tensor(
            "rope_freqs.weight", np.array(model.rope_frequency_factors, dtype=np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
