"""Tiny random Qwen2-MoE, Qwen3-MoE and Mixtral models, also as converters' GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ggml_quants
import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from gguf_names import gguf_name
from tiny_gguf import interleave_rope_rows
from tiny_hf import tiny_model

FIELDS: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
QWEN2_FIELDS = FIELDS | {"norm_topk_prob": False, "shared_expert_intermediate_size": 64}
QWEN3_FIELDS = FIELDS | {"norm_topk_prob": True, "head_dim": 32}


def qwen2_moe(seed: int = 0, **fields: Any) -> Any:
    return tiny_model("Qwen2MoeConfig", seed, **(QWEN2_FIELDS | fields))


def qwen3_moe(seed: int = 0, **fields: Any) -> Any:
    return tiny_model("Qwen3MoeConfig", seed, **(QWEN3_FIELDS | fields))


def mixtral(seed: int = 0, **fields: Any) -> Any:
    sizes = {"num_local_experts": 7, "num_experts_per_tok": 3}
    return tiny_model("MixtralConfig", seed, **(sizes | fields))


def stacked_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights by the names that Transformers gives them in memory: experts in two stacks."""
    return {name: values.contiguous() for name, values in model.state_dict().items()}


def write_gguf(
    path: Path,
    model: Any,
    weight_format: str = "F32",
    *,
    formats: dict[str, str] | None = None,
    fused: bool = False,
    norm_key: bool = False,
) -> None:
    """Write the model, whose own weights become what the file holds.

    Args:
        weight_format: of all matrices but the routers.
        formats: a part's format by its GGUF name (``ffn_down_exps``) instead.
        fused: gate and up of all experts in one tensor, as some converters write them.
        norm_key: whether to write ``expert_weights_norm``, which published files leave out.
    """
    config = model.config
    mixtral = config.model_type == "mixtral"
    architecture = "llama" if mixtral else config.model_type.replace("_", "")
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts if mixtral else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if not mixtral:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if mixtral and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if norm_key:
        writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_value_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    with torch.no_grad():
        for name, values in model.state_dict().items():
            for target, part in gguf_tensors(name, values, fused):
                short = target.split(".")[-2]
                exact = part.ndim == 1 or short.startswith("ffn_gate_inp")
                kind = (formats or {}).get(short, "F32" if exact else weight_format)
                packed, stored = _encode(part.numpy(), kind)
                part.copy_(torch.from_numpy(stored))
                if mixtral and short in ("attn_q", "attn_k"):
                    attention = model.model.layers[0].self_attn
                    packed = interleave_rope_rows(packed, len(packed) // attention.head_dim)
                if short == "ffn_gate_inp_shexp":  # converters drop the dimension of one row
                    packed = packed[0]
                writer.add_tensor(target, packed, raw_dtype=GgmlType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(
    name: str, values: torch.Tensor, fused: bool = False
) -> list[tuple[str, torch.Tensor]]:
    """GGUF names and views of a tensor's parts, with the dimensions of Hugging Face's."""
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    if part == "mlp.experts.down_proj":
        return [(f"blk.{layer}.ffn_down_exps.weight", values)]
    if part == "mlp.experts.gate_up_proj":
        if fused:
            return [(f"blk.{layer}.ffn_gate_up_exps.weight", values)]
        gate, up = values.chunk(2, dim=1)
        return [
            (f"blk.{layer}.ffn_gate_exps.weight", gate),
            (f"blk.{layer}.ffn_up_exps.weight", up),
        ]
    return [(gguf_name(name), values)]


def _encode(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(stored bytes or numbers, float32 values of them)."""
    rows = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
    if kind in ggml_quants.FORMATS:
        packed = ggml_quants.quantize(rows, kind)
    else:
        packed = gguf.quants.quantize(rows, GgmlType[kind])
    stored = gguf.quants.dequantize(packed, GgmlType[kind]).reshape(values.shape)
    return packed.reshape(*values.shape[:-1], -1), stored
