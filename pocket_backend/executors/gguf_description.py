"""A GGUF model described from its header."""

from __future__ import annotations

from math import prod
from pathlib import Path

from pocket_backend.api.errors import ModelLoadError
from pocket_backend.executors.model_description import (
    ModelDescription,
    Shape,
    TokenizerSummary,
    by_format,
    count_experts,
)
from pocket_backend.text.gguf_files import gguf_parts, read_parts
from pocket_backend.text.gguf_metadata import GgufMetadata

BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "F64": (1, 8), "I8": (1, 1), "I16": (1, 2),
    "I32": (1, 4), "I64": (1, 8), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 40), "Q2_K": (256, 84), "Q3_K": (256, 110),
    "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_K": (256, 292),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136), "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}  # fmt: skip
"""Format -> (elements, bytes) of a block."""

_TOKENIZER_KINDS = {"gpt2": "BPE", "llama": "SentencePiece", "bert": "WordPiece", "t5": "Unigram"}


def describe_gguf(path: Path) -> ModelDescription:
    """Describe a file, or all parts of a split model from its first one.

    Raises:
        ModelLoadError: as ``gguf_parts`` and ``read_parts``.
    """
    files = gguf_parts(path)
    infos = read_parts(files)
    tensors = [
        (info.type_name, info.shape, _tensor_bytes(info.type_name, info.shape)) for info in infos
    ]
    with GgufMetadata(path) as metadata:
        architecture = metadata.get_str("general.architecture")
        if architecture is None:
            raise ModelLoadError(f"{path}: general.architecture: is missing")
        return ModelDescription(
            path=path,
            container=f"GGUF v{metadata.version}",
            files=len(files),
            architecture=architecture,
            name=metadata.get_str("general.name"),
            shape=_shape(metadata, architecture),
            formats=by_format(tensors),
            tokenizer=_tokenizer(metadata),
            expert_parameters=count_experts((info.name, info.shape) for info in infos),
        )


def _shape(metadata: GgufMetadata, architecture: str) -> Shape:
    def number(key: str) -> int | None:
        name = f"{architecture}.{key}"
        return None if metadata.array_length(name) is not None else metadata.get_int(name)

    def numbers(key: str) -> tuple[int, ...]:
        name = f"{architecture}.{key}"
        if metadata.array_length(name) is not None:
            return tuple(metadata.get_ints(name) or ())
        value = metadata.get_int(name)
        return () if value is None else (value,)

    hidden, heads = number("embedding_length"), numbers("attention.head_count")
    head_dim = number("attention.key_length")
    if head_dim is None and hidden and heads and max(heads):
        head_dim = hidden // max(heads)
    return Shape(
        layers=number("block_count"),
        hidden=hidden,
        heads=max(heads, default=None),
        kv_heads=numbers("attention.head_count_kv") or heads,
        head_dim=head_dim,
        ffn=max(numbers("feed_forward_length"), default=None),
        vocab=number("vocab_size") or metadata.array_length("tokenizer.ggml.tokens"),
        context=number("context_length"),
        experts=number("expert_count") or None,
        experts_used=number("expert_used_count") or None,
        sliding_window=number("attention.sliding_window") or None,
    )


def _tokenizer(metadata: GgufMetadata) -> TokenizerSummary:
    model = metadata.get_str("tokenizer.ggml.model")
    if model is None:
        return TokenizerSummary("")
    kind, pre = _TOKENIZER_KINDS.get(model, model), metadata.get_str("tokenizer.ggml.pre")
    return TokenizerSummary(
        f"{kind} ({pre})" if pre else kind,
        metadata.array_length("tokenizer.ggml.tokens"),
        metadata.get_str("tokenizer.chat_template"),
    )


def _tensor_bytes(type_name: str, shape: tuple[int, ...]) -> int | None:
    if type_name not in BLOCK_SIZES:
        return None
    elements, size = BLOCK_SIZES[type_name]
    return prod(shape) // elements * size
