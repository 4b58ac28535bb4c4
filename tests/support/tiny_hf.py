"""Tiny random Hugging Face checkpoints: fast to compute, with every structural feature.

Needs torch and transformers. A checkpoint is what ``save_pretrained`` writes, so the names, shards
and fields are Transformers' own.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB = 333
CONTEXT = 512
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(config_class: str, seed: int = 0, **fields: Any) -> Any:
    """A causal language model in float32, in eval mode, with eager attention."""
    config = getattr(transformers, config_class)(**(SIZES | fields))
    config._attn_implementation = "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, seed)
    return model


def randomise(model: Any, seed: int) -> None:
    """Activations stay near 1 and attention is neither flat nor one-hot; biases count."""
    generator = torch.Generator().manual_seed(seed)

    def normal(values: torch.Tensor, scale: float) -> None:
        values.normal_(0.0, scale, generator=generator)

    kind = model.config.model_type
    zero_centred = "gemma" in kind or "qwen3_5" in kind or "qwen3_next" in kind
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "norm" in name:
                normal(values, 0.1)
                values += 0.0 if zero_centred and "linear_attn.norm" not in name else 1.0
            elif "A_log" in name:  # memories of a few to some hundred tokens
                normal(values, 1.0)
                values -= 3.0
            elif values.ndim == 1:
                normal(values, 0.5)
            elif "embed" in name:
                normal(values, 1.0)
            else:
                gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
                normal(values, gain / values.shape[-1] ** 0.5)


def save(model: Any, directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write the checkpoint; the model's own weights are rounded to ``dtype`` as the file's are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        # A copy: the conversion also rounds RoPE's frequencies, which no file holds.
        copy.deepcopy(model).to(dtype).save_pretrained(directory, **options)
    with torch.no_grad():
        for values in model.parameters():
            values.copy_(values.to(dtype))
    return directory


def edit_config(directory: Path, **fields: Any) -> None:
    """Change fields of config.json; None removes one."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config |= fields
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    """float32 [tokens, vocab]."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def random_tokens(count: int, seed: int = 7, vocab: int = VOCAB) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()
