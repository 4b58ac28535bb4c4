"""Builds a tokenizer from a Hugging Face directory.

Read: ``tokenizer.json`` (required), ``tokenizer_config.json``, ``generation_config.json``,
``config.json`` and ``chat_template.jinja``. Only data, no code, comes from the directory.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pocket_backend.api.errors import ModelLoadError, short_repr
from pocket_backend.text.backend_tokenizer import BackendTokenizer
from pocket_backend.text.chat import MAX_TEMPLATE_CHARS, ChatTemplate
from pocket_backend.text.token_bytes import TokenBytes, byte_level_piece, sentencepiece_piece

MAX_CONFIG_BYTES = 16 << 20
MAX_VOCAB_ID = 1 << 22
"""A table has one entry per id, so one stray huge id must not size it."""
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_hf_tokenizer(directory: Path) -> BackendTokenizer:
    """See ``load_tokenizer``."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(f"{file}: not found; a tokenizer directory needs it")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for bad files
        raise ModelLoadError(f"{file}: cannot be read: {str(error)[:300]}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(directory / "tokenizer_config.json")
    named = {name: text for name in _NAMED if (text := _content(config.get(name))) is not None}
    present = {name: text for name, text in named.items() if backend.token_to_id(text) is not None}
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in present.values()
         if not _is_special(backend, text)]
    )  # fmt: skip
    ids = {name: backend.token_to_id(text) for name, text in present.items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    prefix, suffix = _added_around(backend)
    if "add_bos_token" in config or "add_eos_token" in config:
        # Stated explicitly, these replace the post-processor's, as in Transformers.
        prefix = [bos] if config.get("add_bos_token") is True and bos is not None else []
        suffix = [eos] if config.get("add_eos_token") is True and eos is not None else []
    token_bytes = _token_bytes(backend, file)
    eos_ids = _eos_ids(directory, len(token_bytes))
    source = _chat_template(directory, config)
    return BackendTokenizer(
        backend,
        token_bytes,
        bos_token_id=bos if bos is not None else _bos_in_prefix(prefix),
        eos_token_ids=eos_ids | ({eos} if eos is not None else set()),
        unk_token_id=ids.get("unk_token"),
        prefix_ids=tuple(prefix),
        suffix_ids=tuple(suffix),
        chat_template=None
        if source is None
        else ChatTemplate(source, named, origin=str(directory)),
    )


def _is_special(backend: Backend, text: str) -> bool:
    token_id = backend.token_to_id(text)
    added = backend.get_added_tokens_decoder()
    return token_id in added and added[token_id].special


def _bos_in_prefix(prefix: list[int]) -> int | None:
    return prefix[0] if len(prefix) == 1 else None


def _added_around(backend: Backend) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _token_bytes(backend: Backend, file: Path) -> TokenBytes:
    """Read off how the decoder turns pieces into text; other decoders have no bytes per token."""
    state = json.loads(backend.to_str())["decoder"]
    steps = [] if state is None else state.get("decoders", [state])
    kinds = {step["type"] for step in steps}
    strip = any(
        (step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    if "ByteLevel" in kinds:
        spell = byte_level_piece
    elif kinds & {"ByteFallback", "Metaspace"}:
        spell = sentencepiece_piece
    else:
        raise ModelLoadError(
            f"{file}: decoder {sorted(kinds)} is not supported; ByteLevel and ByteFallback are"
        )
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    if not 0 < size <= MAX_VOCAB_ID:
        raise ModelLoadError(f"{file}: the highest token id is {size - 1}; {MAX_VOCAB_ID} is legal")
    table = [b""] * size
    for piece, token_id in vocab.items():
        table[token_id] = spell(piece)
    added = backend.get_added_tokens_decoder()
    for token_id, token in added.items():
        table[token_id] = token.content.encode("utf-8", "surrogatepass")
        if spell is sentencepiece_piece:
            table[token_id] = sentencepiece_piece(token.content)
    special = [token_id for token_id, token in added.items() if token.special]
    return TokenBytes(table, special, strip_leading_space=strip)


def _eos_ids(directory: Path, size: int) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        found = set()
        for token_id in values:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ModelLoadError(
                    f"{directory / name}: eos_token_id: is {short_repr(value)}, must be ids"
                )
            if 0 <= token_id < size:
                found.add(token_id)
        return frozenset(found)
    return frozenset()


def _chat_template(directory: Path, config: dict[str, object]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _read_text(file, 4 * MAX_TEMPLATE_CHARS)
    value = config.get("chat_template")
    if isinstance(value, list):
        by_name = {
            item.get("name"): item.get("template") for item in value if isinstance(item, dict)
        }
        value = by_name.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelLoadError(
            f"{directory / 'tokenizer_config.json'}: chat_template: must be a string or a list of "
            "named templates with a default"
        )
    return value


def _content(value: object) -> str | None:
    """A special token is stated as a string or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_json(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file}: must be a JSON object")
    return value


def _read_text(file: Path, limit: int) -> str:
    try:
        if file.stat().st_size > limit:
            raise ModelLoadError(f"{file}: is larger than {limit} bytes")
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{file}: cannot be read: {error}") from error
