"""Writes the seed corpora of the fuzzers of whole models. Run from the repository root:

    PYTHONPATH=tests/support python tests/fuzz/make_model_seeds.py

The smallest models that the kernels take, one of each kind. The files are committed. Deterministic
for one version of Transformers, which writes the configurations.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_experts
import tiny_qwen35
import torch
from gguf import GGMLQuantizationType as GgmlType
from split_gguf import split_gguf
from tiny_gguf import TinyLlama, write_gguf
from tiny_hf import save, tiny_model

CORPUS = Path(__file__).with_name("corpus")
PART_MARK = b"\n--part--\n"
"""kPartMark of load_parts.h."""

SIZES: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 32}
RECURRENT = {
    "num_hidden_layers": 2,
    "layer_types": [tiny_qwen35.LINEAR, tiny_qwen35.FULL],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

THREE = {"num_hidden_layers": 3, "layer_types": [*RECURRENT["layer_types"], tiny_qwen35.LINEAR]}
"""What `tiny_qwen35.write_gguf` writes: its further block is the fourth."""


def shrunk(path: Path) -> bytes:
    """The file with its float matrices as Q4_0; stacks of experts and small ones stay."""
    reader = gguf.GGUFReader(str(path))
    out = path.with_name("shrunk.gguf")
    writer = gguf.GGUFWriter(str(out), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, element)
    for tensor in reader.tensors:
        small = any(part in tensor.name for part in ("conv1d", "gate_inp", "nextn"))
        if tensor.tensor_type == GgmlType.F32 and tensor.data.ndim > 1 and not small:
            packed = gguf.quants.quantize(np.asarray(tensor.data), GgmlType.Q4_0)
            writer.add_tensor(tensor.name, packed, raw_dtype=GgmlType.Q4_0)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out.read_bytes()


def gguf_models(folder: Path) -> dict[str, bytes]:
    tiny = TinyLlama(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=32, vocab=8,
                     context=64, weight_format="Q4_0", tokenizer_tokens=8,
                     end_tokens={"eos": 2})  # fmt: skip
    path = folder / "llama.gguf"
    write_gguf(path, tiny)
    made = {"llama": path.read_bytes()}
    parts = split_gguf(path, folder, 6)
    made["split"] = PART_MARK.join(part.read_bytes() for part in parts)
    made["split_short"] = made["split"][:-40]
    made["split_one_missing"] = PART_MARK.join([parts[0].read_bytes(), b""])
    writers: dict[str, tuple[Callable[..., None], Any]] = {
        "qwen2moe": (tiny_experts.write_gguf, tiny_experts.qwen2_moe(**SIZES, **EXPERTS, **SHARED)),
        "qwen3moe": (tiny_experts.write_gguf, tiny_experts.qwen3_moe(**(SIZES | EXPERTS))),
        "qwen35": (tiny_qwen35.write_gguf, tiny_qwen35.qwen35(**(SIZES | RECURRENT | THREE))),
    }
    for name, (write, model) in writers.items():
        write(folder / f"{name}.gguf", model)
        made[name] = shrunk(folder / f"{name}.gguf")
    return made


def checkpoints(folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Whole directories, and their config.json alone."""
    whole, configs = {}, {}
    sliding = {"layer_types": ["sliding_attention"], "sliding_window": 8}
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
            "original_max_position_embeddings": 16}  # fmt: skip
    llama3 = yarn | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kinds: dict[str, tuple[str, dict[str, Any], bool]] = {
        "llama": ("LlamaConfig", {"rope_parameters": llama3}, True),
        "mistral": ("MistralConfig", {"sliding_window": 8}, False),
        "qwen2": ("Qwen2Config", {"rope_parameters": yarn}, False),
        "gemma3": ("Gemma3TextConfig", sliding, True),
        "qwen2_moe": ("Qwen2MoeConfig", EXPERTS | SHARED, False),
        "qwen3_moe": ("Qwen3MoeConfig", EXPERTS, False),
        "qwen3_5": ("Qwen3_5TextConfig", RECURRENT, True),
        "qwen3_5_moe": ("Qwen3_5MoeTextConfig", RECURRENT | EXPERTS | SHARED, False),
    }
    for name, (config_class, fields, keep_weights) in kinds.items():
        model = tiny_model(config_class, **(SIZES | {"tie_word_embeddings": True} | fields))
        directory = save(model, folder / name, torch.bfloat16)
        configs[name] = (directory / "config.json").read_bytes()
        if keep_weights:
            whole[name] = joined(directory)
    return whole, configs


def joined(directory: Path) -> bytes:
    """The files of checkpoint_fuzz.cpp, with a small tokenizer."""
    tokens = ", ".join(f'"t{index}": {index}' for index in range(8))
    added = '{"id": 3, "content": "t3"}'
    parts: Sequence[bytes] = [
        (directory / "config.json").read_bytes(),
        (directory / "model.safetensors").read_bytes(),
        b'{"eos_token_id": [2, 99]}',
        f'{{"model": {{"vocab": {{{tokens}}}}}, "added_tokens": [{added}]}}'.encode(),
        b'{"eos_token": {"content": "t3"}}',
    ]
    return PART_MARK.join(parts)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, configs = checkpoints(folder)
        for kind, seeds, suffix in (
            ("gguf_model", gguf_models(folder), "gguf"),
            ("checkpoint", whole, "parts"),
            ("hf_config", configs, "json"),
        ):
            (CORPUS / kind).mkdir(parents=True, exist_ok=True)
            for seed, contents in seeds.items():
                (CORPUS / kind / f"{seed}.{suffix}").write_bytes(contents)


if __name__ == "__main__":
    main()
