"""Tokenizers from Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import smollm2_file

from pocket_backend.api import InvalidRequestError, ModelLoadError
from pocket_backend.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(smollm2_file())


@pytest.fixture
def directory(tmp_path: Path, smollm2: Tokenizer) -> Path:
    """SmolLM2's tokenizer as a directory."""
    folder = tmp_path / "hf"
    folder.mkdir()
    smollm2._backend.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    assert smollm2.chat_template is not None
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "chat_template": smollm2.chat_template.source,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_directory_gives_the_same_tokenizer(directory: Path, smollm2: Tokenizer) -> None:
    this = load_tokenizer(directory)
    assert (this.vocab_size, this.special_ids) == (smollm2.vocab_size, smollm2.special_ids)
    assert (this.eos_token_ids, this.bos_token_id) == ({2}, 1)
    text = "3333 + 777 = ?\n\n ភាសា 😀 <|im_end|>"
    assert this.encode(text) == smollm2.encode(text)
    assert this.token_bytes.table(False) == smollm2.token_bytes.table(False)
    messages = [{"role": "user", "content": "Hi <|im_end|>"}]
    assert this.apply_chat_template(messages) == smollm2.apply_chat_template(messages)
    assert load_tokenizer("nowhere.gguf", directory / "tokenizer.json").vocab_size == 49152


def test_generation_config_adds_end_ids(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load_tokenizer(directory).eos_token_ids == {2, 7}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2, 10**6]}))
    assert load_tokenizer(directory).eos_token_ids == {0, 2}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": "two"}))
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id"):
        load_tokenizer(directory)


def test_added_tokens_count_into_the_vocabulary(directory: Path) -> None:
    state = json.loads((directory / "tokenizer.json").read_text())
    added = dict(state["added_tokens"][0], id=49152, content="<|new|>", special=False)
    state["added_tokens"].append(added)
    (directory / "tokenizer.json").write_text(json.dumps(state))
    this = load_tokenizer(directory)
    assert this.vocab_size == 49153
    assert this.encode("<|new|>") == [49152]
    assert this.decode([49152]) == "<|new|>"


def test_v7_bos_of_a_directory(directory: Path) -> None:
    state = json.loads((directory / "tokenizer.json").read_text())
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(state))
    plain = load_tokenizer(directory)
    assert plain.adds_bos
    assert plain.encode("Hi")[0] == 1
    assert plain.encode("<|im_start|>Hi") == plain.encode("Hi")
    edit(directory, add_bos_token=False)
    assert load_tokenizer(directory).encode("Hi") == plain.encode("Hi")[1:]
    edit(directory, add_bos_token=True, add_eos_token=True)
    assert load_tokenizer(directory).encode("Hi") == [*plain.encode("Hi"), 2]


def test_chat_templates_of_a_directory(directory: Path) -> None:
    edit(directory, chat_template=[{"name": "tool_use", "template": "T"},
                                   {"name": "default", "template": "D"}])  # fmt: skip
    template = load_tokenizer(directory).chat_template
    assert template is not None
    assert template.source == "D"
    (directory / "chat_template.jinja").write_text("{{ eos_token }}")
    template = load_tokenizer(directory).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "a"}]) == "<|im_end|>"


def test_no_chat_template_names_the_remedy(directory: Path) -> None:
    edit(directory, chat_template=None)
    with pytest.raises(InvalidRequestError, match="messages: this model has no chat template"):
        load_tokenizer(directory).apply_chat_template([{"role": "user", "content": "a"}])


def test_bad_directories_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not found"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelLoadError, match="pre= is for GGUF files"):
        load_tokenizer(directory, pre="smollm")
    edit(directory, chat_template=7)
    with pytest.raises(ModelLoadError, match="chat_template: must be"):
        load_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: must be a JSON object"):
        load_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="is not valid JSON"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(directory)


def test_a_decoder_without_bytes_per_token_is_refused(directory: Path) -> None:
    state = json.loads((directory / "tokenizer.json").read_text())
    state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (directory / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ModelLoadError, match=r"decoder .*WordPiece.* is not supported"):
        load_tokenizer(directory)
