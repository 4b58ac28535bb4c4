"""Tiny random Qwen3.5 models, dense and MoE, and Qwen3-Next, also as the GGUF files that converters
write.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf_names import QWEN35_NORMS, gguf_name
from tiny_experts import gguf_tensors
from tiny_hf import tiny_model

LINEAR, FULL = "linear_attention", "full_attention"
FIELDS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


MOE_FIELDS: dict[str, Any] = FIELDS | {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}


def qwen35(**fields: Any) -> Any:
    return tiny_model("Qwen3_5TextConfig", **(FIELDS | fields))


def qwen35_moe(**fields: Any) -> Any:
    return tiny_model("Qwen3_5MoeTextConfig", **(MOE_FIELDS | fields))


def qwen3_next(**fields: Any) -> Any:
    return tiny_model("Qwen3NextConfig", **(MOE_FIELDS | {"norm_topk_prob": True} | fields))


def gguf_tensor(name: str, values: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """As llama.cpp's converter stores it: norms around one, -e^A_log, and in Qwen3.5 value heads
    one key head's apart instead of together.
    """
    offset = np.float32("norm" in name and "linear_attn" not in name)
    if ".layers." not in name:
        return gguf_name(name), values + offset
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    order = np.arange(heads)
    if config.model_type != "qwen3_next":
        order = order.reshape(keys, heads // keys).T.ravel()
    dim = config.linear_value_head_dim

    def heads_of(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(heads, -1, *rows.shape[1:])[order].reshape(rows.shape)

    match part.removeprefix("linear_attn.").removesuffix(".weight"):
        case "A_log":
            rate = -np.exp(values[order].astype(np.float64))  # rounded once, as in the engine
            return f"blk.{layer}.ssm_a", rate.astype(np.float32)
        case "dt_bias":
            return f"blk.{layer}.ssm_dt.bias", values[order]
        case "in_proj_z" | "in_proj_a" | "in_proj_b":
            values = heads_of(values)
        case "in_proj_qkv" | "conv1d":
            values = values.reshape(len(values), -1)
            value_rows = heads_of(values[-heads * dim :])
            values = np.concatenate([values[: -heads * dim], value_rows])
        case "out_proj":
            values = np.ascontiguousarray(heads_of(values.T).T)
    return gguf_name(name, QWEN35_NORMS), values + offset


def split_in_proj(values: np.ndarray, config: Any) -> tuple[np.ndarray, np.ndarray]:
    """(q, k and v; z) of Qwen3-Next's projection, whose rows come key head by key head."""
    keys, dim = config.linear_num_key_heads, config.linear_key_head_dim
    rows = values.reshape(keys, -1, values.shape[-1])
    wide = (rows.shape[1] - 2 * dim) // 2
    parts = np.split(rows, [dim, 2 * dim, 2 * dim + wide], axis=1)
    q, k, v, z = (np.ascontiguousarray(part).reshape(-1, values.shape[-1]) for part in parts)
    return np.concatenate([q, k, v]), z


def write_gguf(path: Any, model: Any, *, split: bool = True) -> None:
    """``split``: Qwen3-Next's ``in_proj_qkvz`` as two tensors; older converters did not."""
    config = model.config
    moe = config.model_type != "qwen3_5_text"
    architectures = {"qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
    architecture = architectures.get(config.model_type, "qwen35")
    writer = gguf.GGUFWriter(str(path), architecture)
    extra = int(architecture != "qwen3next")  # a layer that predicts further tokens
    writer.add_block_count(config.num_hidden_layers + extra)
    if extra:
        writer.add_nextn_predict_layers(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if moe:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim // 4)
    if extra:
        writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_full_attention_interval(2)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    for name, values in model.state_dict().items():
        if split and name.endswith("in_proj_qkvz.weight"):
            mixed, gate = split_in_proj(values.numpy(), config)
            layer = name.split(".")[2]
            writer.add_tensor(f"blk.{layer}.attn_qkv.weight", mixed)
            writer.add_tensor(f"blk.{layer}.attn_gate.weight", gate)
        elif moe and ".mlp." in name:
            for target, part in gguf_tensors(name, values):
                rows = part.numpy()
                writer.add_tensor(target, rows[0] if len(rows) == 1 else rows)
        else:
            writer.add_tensor(*gguf_tensor(name, values.numpy(), config))
    if extra:
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
