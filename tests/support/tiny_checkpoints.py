"""Tiny random checkpoints of many architectures, as directories that Transformers loads.

Small enough to compute in milliseconds; weights large enough that attention is neither flat nor
one-hot and that greedy outputs depend on the whole context.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 320
CONTEXT = 256
WINDOW = 24

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING = ["sliding_attention", "full_attention"]

_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}

_MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}

_STATE_ONLY = {"state_size": 8, "conv_kernel": 4, "expand": 2}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {**_MOE, "norm_topk_prob": True, "decoder_sparse_step": 1}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
    ),
    "gemma3": ("Gemma3Text", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": WINDOW,
            "layer_types": _SLIDING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "head_dim": 8,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen3_5": ("Qwen3_5Text", _HYBRID),
    "qwen3_next": ("Qwen3Next", {**_HYBRID, **_MOE, "shared_expert_intermediate_size": 32}),
    "minimax": (
        "MiniMax",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "block_size": 8,
            "num_local_experts": 4,
            "linear_attn_alpha_factor": 2.0,
        },
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {**_HYBRID, **_MOE, "shared_expert_intermediate_size": 32},
    ),
    "bamba": ("Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_MAMBA,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "mamba": ("Mamba", _STATE_ONLY),
    "falcon_mamba": ("FalconMamba", _STATE_ONLY),
    "mamba2": (
        "Mamba2",
        {**_STATE_ONLY, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    ),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "mlp",
                "linear_attention",
            ],
            "num_hidden_layers": 5,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {key: value for key, value in _HYBRID.items() if key != "partial_rotary_factor"},
    ),
}
"""Name -> (class prefix in Transformers, what differs from ``_BASE``)."""
SLOW = frozenset(
    {"bamba", "falcon_mamba", "granitemoehybrid", "olmo_hybrid", "qwen3_5_moe", "qwen3_next"}
)
"""Architectures whose tests are not run by default: their kind is tested with another one."""


STEPWISE = frozenset({"nemotron_h"})
"""Architectures whose decode step in Transformers differs from its pass over a whole sequence, by
up to 0.09 of logits with a standard deviation of 1.5: there is no one-pass oracle for them."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory and its model, in float32, with Transformers' own attention."""

    path: Path
    model: Any
    stepwise: bool = False
    """See ``STEPWISE``: only `greedy` says what follows."""

    def best_next(self, tokens: list[int]) -> list[int]:
        """The most likely next token after every prefix of ``tokens``, in one pass, no cache."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].argmax(dim=1).tolist()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What ``generate`` continues ``prompt`` with, alone."""
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            out = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()


def write_checkpoint(path: Path, name: str, *, seed: int = 0, **changes: Any) -> Checkpoint:
    """Write the architecture ``name`` of ``CONFIGS`` to ``path``; ``changes`` are config fields."""
    prefix, fields = CONFIGS[name]
    transformers.utils.logging.disable_progress_bar()
    # Some initial values are kept below, such as the time steps of state-space layers.
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        config = getattr(transformers, f"{prefix}Config")(**(_BASE | fields | changes))
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.ndim == 1:  # norms, biases, sinks
                parameter.add_(0.2 * noise)
            elif "embed" in parameter_name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(path)
    return Checkpoint(path, model, stepwise=name in STEPWISE)


TOKENIZER_SIZE = 259
"""Fewer than ``VOCAB``: the ids above are padding of the logits."""


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer.json: pad, bos, eos, then one token per byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    assert backend.get_vocab_size() == TOKENIZER_SIZE
    backend.save(str(path / "tokenizer.json"))
