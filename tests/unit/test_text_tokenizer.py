"""Tokenizers from GGUF metadata, named after the cases users reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import (
    BYTE,
    CHATML,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level_gguf,
    smollm2_file,
    spm_gguf,
    write_gguf,
)

from pocket_backend.api import InvalidRequestError, ModelLoadError
from pocket_backend.text import Tokenizer, load_tokenizer
from pocket_backend.text.tokenizer import MAX_PROMPT_BYTES


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(smollm2_file())


def test_smollm2_reads_as_its_makers_state(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == {2}
    assert smollm2.bos_token_id == 1
    assert smollm2.special_ids == set(range(17))
    assert not smollm2.adds_bos
    assert smollm2.token_to_id("<|im_end|>") == 2
    assert smollm2.token_to_id("no such token") is None
    assert smollm2.decode([504, 3575, 282, 4649, 314, 7042, 2]) == "The capital of France is Paris"


def test_smollm2_chat_prompt(smollm2: Tokenizer) -> None:
    ids = smollm2.apply_chat_template(
        [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the capital of France?"},
        ]
    )
    assert ids == [
        *(1, 9690, 198, 2683, 359, 253, 5356, 11173, 30, 2, 198),
        *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198),
        *(1, 520, 9531, 198),
    ]  # fmt: skip


def test_l5_digits_are_split_as_the_vocabulary_was_trained(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("3333 + 777 = ?")
    assert [smollm2.decode([token]) for token in ids] == [
        *"3333", " +", " ", *"777", " =", " ?"
    ]  # fmt: skip
    assert smollm2.decode(smollm2.encode("a\n 12 ភា 👩‍👩‍👧")) == "a\n 12 ភា 👩‍👩‍👧"


def test_l5_a_missing_or_unknown_pre_is_a_loud_error(tmp_path: Path) -> None:
    for pre, message in [
        (None, "tokenizer.ggml.pre: absent"),
        ("novel", "pre: 'novel' is unknown"),
    ]:
        path = byte_level_gguf(tmp_path / "model.gguf", pre=pre)
        with pytest.raises(ModelLoadError, match=message) as caught:
            load_tokenizer(path)
        assert "model.gguf" in str(caught.value)
        assert "smollm" in str(caught.value), "the remedy lists the known names"
        assert load_tokenizer(path, pre="gpt-2").encode("12", add_special_tokens=False)
    with pytest.raises(ModelLoadError, match="unknown"):
        load_tokenizer(path, pre="also-novel")


def test_l5_the_split_decides_the_ids(tmp_path: Path) -> None:
    path = byte_level_gguf(tmp_path / "model.gguf")
    whole, single = load_tokenizer(path), load_tokenizer(path, pre="smollm")
    assert whole.encode("12", False) == [whole.token_to_id("12")]
    assert single.encode("12", False) == [single.token_to_id("1"), single.token_to_id("2")]


def test_l7_padding_of_the_vocabulary_is_no_token(tmp_path: Path) -> None:
    plain = load_tokenizer(byte_level_gguf(tmp_path / "a.gguf"))
    size = plain.vocab_size
    more = [(f"[PAD{index}]", UNUSED) for index in range(size, size + 13)]
    padded = load_tokenizer(byte_level_gguf(tmp_path / "b.gguf", more=more))
    assert padded.vocab_size == size
    assert padded.decode([padded.encode("a", False)[0], size + 3, -1, 10**9]) == "a"


def test_l7_unused_tokens_inside_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    more = [("[unused]", UNUSED), ("<tool>", USER_DEFINED)]
    this = load_tokenizer(byte_level_gguf(tmp_path / "a.gguf", more=more))
    size = this.vocab_size
    assert this.decode([size - 2]) == ""
    assert this.decode([size - 1]) == "<tool>"
    assert this.encode("a<tool>", False)[-1] == size - 1


def test_v1_an_empty_prompt_is_empty_or_bos(tmp_path: Path, smollm2: Tokenizer) -> None:
    assert smollm2.encode("") == []
    this = load_tokenizer(byte_level_gguf(tmp_path / "model.gguf"))
    assert this.encode("") == [this.bos_token_id]


def test_v7_exactly_one_bos_on_every_path(tmp_path: Path) -> None:
    template = "{{ bos_token }}" + CHATML
    with_bos = load_tokenizer(byte_level_gguf(tmp_path / "a.gguf", chat_template=template))
    without = load_tokenizer(byte_level_gguf(tmp_path / "b.gguf"))
    messages = [{"role": "user", "content": "hello"}]
    assert with_bos.chat_template is not None
    templated = with_bos.chat_template.render(messages)
    assert templated.startswith("<|bos|>")
    paths = [
        with_bos.apply_chat_template(messages),
        with_bos.encode(templated),
        with_bos.encode(templated, add_special_tokens=False),
        without.apply_chat_template(messages),
        without.encode(templated),
        without.encode(templated.removeprefix("<|bos|>")),
    ]
    assert all(path == paths[0] for path in paths)
    assert paths[0].count(with_bos.bos_token_id) == 1
    assert without.encode("hello") == [without.bos_token_id, without.token_to_id("hello")]
    assert without.encode("hello", add_special_tokens=False) == [without.token_to_id("hello")]


def test_v7_no_bos_where_the_model_wants_none(tmp_path: Path) -> None:
    this = load_tokenizer(byte_level_gguf(tmp_path / "a.gguf", add_bos_token=False))
    assert not this.adds_bos
    assert this.encode("hello") == [this.token_to_id("hello")]
    assert this.apply_chat_template([{"role": "user", "content": "a"}])[0] != this.bos_token_id


def test_eos_sources_are_all_read(tmp_path: Path) -> None:
    more = [("<|eom_id|>", CONTROL), ("<|eot|>", CONTROL), ("<|end|>", CONTROL)]
    plain = load_tokenizer(byte_level_gguf(tmp_path / "a.gguf", more=more))
    ids = {token: plain.token_to_id(token) for token, _ in more}
    # <|im_end|> counts because the chat template writes it, <|end|> does not.
    assert plain.eos_token_ids == {plain.token_to_id("<|bos|>"), plain.token_to_id("<|im_end|>")}
    named = load_tokenizer(
        byte_level_gguf(
            tmp_path / "b.gguf",
            more=more,
            eot_token_id=ids["<|eot|>"],
            eom_token_id=ids["<|eom_id|>"],
        )
    )
    assert named.eos_token_ids == plain.eos_token_ids | {ids["<|eot|>"], ids["<|eom_id|>"]}


def test_sentencepiece_from_scores(tmp_path: Path) -> None:
    this = load_tokenizer(spm_gguf(tmp_path / "model.gguf"))
    hello = this.token_to_id("\u2581hello")
    assert this.encode("hello") == [1, hello]
    assert this.encode("hello hello", False) == [hello, hello]
    assert this.encode("é", False)[1:] == [3 + 0xC3, 3 + 0xA9]
    assert this.decode([1, hello, hello, 3 + 0xC3, 3 + 0xA9, 2]) == "hello helloé"
    assert this.encode("</s>", False) == [2]
    assert this.eos_token_ids == {2}
    # Only the first text of a prompt gets the prefix space.
    assert this.encode("<s>hello", False) == [1, this.token_to_id("hello")]


def test_sentencepiece_without_prefix_space(tmp_path: Path) -> None:
    this = load_tokenizer(spm_gguf(tmp_path / "model.gguf", add_space_prefix=False))
    assert this.encode("hello", False) == [this.token_to_id("hello")]
    assert this.decode([this.token_to_id("\u2581hello") or 0]) == " hello"


def test_gemma_spells_runs_of_spaces_with_marks(tmp_path: Path) -> None:
    vocab = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
    vocab += [("  ", NORMAL), ("\u2581", NORMAL), ("a", NORMAL), ("\u2581a", NORMAL)]
    vocab += [(f"<0x{value:02X}>", BYTE) for value in range(256)]
    path = write_gguf(
        tmp_path / "model.gguf",
        vocab,
        architecture="gemma2",
        model="llama",
        scores=[-1000.0] * len(vocab),
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
    )
    this = load_tokenizer(path)
    assert this.encode("a  a") == [2, 6, 4, 6]
    assert this.decode([2, 6, 4, 6, 7]) == "a  a a"
    assert this.decode([7]) == " a"


def test_phi3_prefixes_every_text_with_a_space(tmp_path: Path) -> None:
    this = load_tokenizer(spm_gguf(tmp_path / "model.gguf", architecture="phi3"))
    space, hello = this.token_to_id("\u2581"), this.token_to_id("\u2581hello")
    assert this.encode("  hello", False) == [space, space, hello]
    assert this.decode([space or 0, hello or 0]) == " hello"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "model: 'bert' is not supported"),
        ({"model": None}, "model: None is not supported"),
        ({"merges": None}, "merges: absent"),
        ({"merges": ["a b", "zzz y"]}, r"merges\[1\]: 'zzz y'"),
        ({"merges": ["ab"]}, r"merges\[0\]"),
        ({"bos_token_id": 10_000}, "bos_token_id: 10000 is not one of"),
        ({"bos_token_id": None}, "bos_token_id: absent"),
        ({"more": [("a", NORMAL)]}, "is also token 0"),
        ({"chat_template": "{% for %}"}, "chat_template does not compile"),
        ({"eos_token_id": "two"}, "eos_token_id: is 'two', must be an integer"),
    ],
)
def test_inconsistent_files_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = byte_level_gguf(tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_tokenizer(path)
    assert "model.gguf" in str(caught.value)


def test_sentencepiece_needs_scores(tmp_path: Path) -> None:
    for scores in (None, [0.5, 1.0]):
        path = spm_gguf(tmp_path / "model.gguf", scores=scores)
        with pytest.raises(ModelLoadError, match="scores: absent or shorter"):
            load_tokenizer(path)


@pytest.mark.parametrize("text", ["\ud800", "x" * (MAX_PROMPT_BYTES + 1)])
def test_text_that_cannot_be_encoded_is_refused(smollm2: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="text_input"):
        smollm2.encode(text)
