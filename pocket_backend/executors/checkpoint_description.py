"""A Hugging Face directory with safetensors, described from `config.json` and file headers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pocket_backend.api.errors import ModelLoadError, short_repr
from pocket_backend.executors.model_description import (
    ModelDescription,
    Shape,
    TokenizerSummary,
    by_format,
    count_experts,
)

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_JSON_BYTES = 256 << 20
_INDEX = "model.safetensors.index.json"


def describe_checkpoint(directory: Path) -> ModelDescription:
    """Raises ModelLoadError: a file is missing or damaged; names it."""
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"model: {directory} holds neither a GGUF file nor config.json with safetensors"
        )
    config = _json(directory / "config.json")
    files = _weight_files(directory)
    tensors = [tensor for file in files for tensor in read_header(file)]
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    return ModelDescription(
        path=directory,
        container="safetensors",
        files=len(files),
        architecture=str(named or config.get("model_type") or "unknown"),
        name=directory.name,
        shape=_shape(config),
        formats=by_format(tensor[1:] for tensor in tensors),
        tokenizer=_tokenizer(directory),
        expert_parameters=count_experts((name, shape) for name, _, shape, _ in tensors),
    )


def read_header(file: Path) -> list[tuple[str, str, Sequence[int], int]]:
    """(name, format, shape, bytes) of each tensor of a safetensors file.

    Raises:
        ModelLoadError: the header is damaged, or promises more bytes than the file has.
    """
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelLoadError(f"{file}: is not a safetensors file, or is cut off")
            header = json.loads(opened.read(length))
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError:
        raise ModelLoadError(f"{file}: its header is not JSON") from None
    data = size - 8 - length
    found: list[tuple[str, str, Sequence[int], int]] = []
    for name, entry in header.items() if isinstance(header, dict) else ():
        if name == "__metadata__":
            continue
        try:
            kind, shape = str(entry["dtype"]), [int(n) for n in entry["shape"]]
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ModelLoadError(f"{file}: tensor {short_repr(name)}: is not described") from None
        if not 0 <= begin <= end <= data:
            raise ModelLoadError(
                f"{file}: tensor {short_repr(name)}: ends at byte {end} of {data} that are there"
            )
        found.append((name, kind, shape, end - begin))
    return found


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelLoadError(f"model: {directory} has config.json, but no *.safetensors")
        return files
    weights = _json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ModelLoadError(f"{index}: weight_map: must name a file for each tensor")
    names = sorted({str(name) for name in weights.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelLoadError(f"{index}: weight_map: {short_repr(name)} is not a file name")
        if not (directory / name).is_file():
            raise ModelLoadError(f"{index}: {name} is missing")
    return [directory / name for name in names]


def _shape(config: Mapping[str, Any]) -> Shape:
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, dict) else config

    def number(*names: str) -> int | None:
        for name in names:
            if type(value := values.get(name)) is int:
                return value
        return None

    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    kv_heads = number("num_key_value_heads") or heads
    head_dim = number("head_dim")
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    return Shape(
        layers=number("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=() if kv_heads is None else (kv_heads,),
        head_dim=head_dim,
        ffn=number("intermediate_size", "n_inner"),
        vocab=number("vocab_size"),
        context=number("max_position_embeddings", "n_positions"),
        experts=number("num_local_experts", "num_experts"),
        experts_used=number("num_experts_per_tok"),
        sliding_window=number("sliding_window"),
    )


def _tokenizer(directory: Path) -> TokenizerSummary:
    template = _chat_template(directory)
    file = directory / "tokenizer.json"
    if not file.is_file():
        other = directory / "tokenizer.model"
        return TokenizerSummary("SentencePiece" if other.is_file() else "", None, template)
    content = _json(file)
    model = content.get("model")
    if not isinstance(model, dict):
        raise ModelLoadError(f"{file}: model: is missing")
    ids = set(range(len(model.get("vocab") or ())))
    ids |= {token["id"] for token in content.get("added_tokens") or () if "id" in token}
    return TokenizerSummary(str(model.get("type") or "unknown"), len(ids), template)


def _chat_template(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    config = directory / "tokenizer_config.json"
    if not config.is_file():
        return None
    template = _json(config).get("chat_template")
    if isinstance(template, list):  # several by name
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{file}: is larger than {MAX_JSON_BYTES} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError:
        raise ModelLoadError(f"{file}: is not JSON") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file}: must hold a JSON object")
    return content
