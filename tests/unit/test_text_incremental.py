"""Incremental text, named after the cases that users reported (detokenization)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocket_backend.api import InvalidRequestError
from pocket_backend.text import IncrementalDetokenizer, OutputText, TokenBytes, chunk_text
from pocket_backend.text.token_bytes import (
    byte_level_alphabet,
    byte_level_piece,
    sentencepiece_piece,
)


def single_bytes(*more: bytes, special: tuple[int, ...] = (), strip: bool = False) -> TokenBytes:
    """Ids 0 .. 255 are single bytes; the others follow."""
    table = [bytes([value]) for value in range(256)] + list(more)
    return TokenBytes(table, special, strip_leading_space=strip)


def feed_each(table: TokenBytes, ids: list[int], skip: bool = True) -> list[str]:
    """Text after each token, then the last chunk's."""
    output = OutputText(table, skip_special_tokens=skip)
    pushed = [output.push(token) for token in ids]
    return ["" if chunk is None else chunk.text for chunk in pushed] + [output.finish().text]


def test_d1_sentencepiece_words_keep_their_spaces() -> None:
    pieces = ["\u2581What", "\u2581is", "\u2581deep", "\u2581learning", "?"]
    table = TokenBytes([sentencepiece_piece(piece) for piece in pieces], strip_leading_space=True)
    texts = feed_each(table, [0, 1, 2, 3, 4])
    assert texts == ["What", " is", " deep", " learning", "?", ""]


def test_d1_a_lone_leading_space_is_hidden_once() -> None:
    table = TokenBytes([b" ", b"a", b"  b"], strip_leading_space=True)
    assert feed_each(table, [0, 1]) == ["", "a", ""]
    assert feed_each(table, [0, 0, 1]) == ["", " ", "a", ""]
    assert feed_each(table, [2]) == [" b", ""]
    assert table.decode([0]) == ""
    output = OutputText(table)
    output.push(0)
    chunk = output.push(1)
    assert chunk is not None
    assert (chunk.token_ids, chunk.text_range) == ((0, 1), (1, 2))


def test_d2_eight_tokens_per_chunk_lose_no_space() -> None:
    table = TokenBytes([b" a", b"b", b" ", b"c "])
    ids = [0, 1, 2, 3, 0, 0, 1, 2, 2, 2, 3, 3, 0, 1, 1, 2, 0]
    detokenizer = IncrementalDetokenizer(table)
    chunks = [detokenizer.feed(ids[at : at + 8]) for at in range(0, len(ids), 8)]
    text = "".join("" if chunk is None else chunk.text for chunk in chunks)
    assert text + detokenizer.finish().text == table.decode(ids)


@given(
    st.lists(
        st.sampled_from(
            [b"", b" ", b"ab", "\u00e9".encode(), b"\xc3", b"\xa9", b"x\xe4\xb8", b"\xad\xe4",
             b"\xf0\x9f", b"\xff"]
        ),
        max_size=30,
    ),
    st.booleans(),
)  # fmt: skip
def test_push_is_feed_of_one_token(pieces: list[bytes], strip: bool) -> None:
    table = TokenBytes(pieces, strip_leading_space=strip)
    short, long = IncrementalDetokenizer(table), IncrementalDetokenizer(table)
    ids = [*range(len(pieces)), len(pieces), -1]  # two that the table does not have
    assert [short.push(token) for token in ids] == [long.feed([token]) for token in ids]
    assert short.finish() == long.finish()


def test_d4_stray_bytes_then_an_ordinary_token_go_on() -> None:
    table = single_bytes(b"hello", b" \xe4\xb8")
    ids = [0x80, 0xE4, 256, 257, 256, 0xAD, 257, 0xAD]
    text = "\ufffd\ufffdhello \ufffdhello\ufffd \u4e2d"
    assert "".join(feed_each(table, ids)) == table.decode(ids) == text


@pytest.mark.parametrize("split", [(2, 2), (3, 1), (1, 3), (1, 1, 1, 1)])
def test_d5_split_emoji(split: tuple[int, ...]) -> None:
    data, parts, at = "😀".encode(), [], 0
    for size in split:
        parts.append(data[at : at + size])
        at += size
    texts = feed_each(TokenBytes(parts), list(range(len(parts))))
    assert texts == [""] * (len(parts) - 1) + ["😀", ""]


def test_d5_split_emoji_reports_its_tokens_together() -> None:
    output = OutputText(TokenBytes([b"a\xf0\x9f", b"\x98\x80b"]))
    first, second = output.push(0), output.push(1)
    assert first is not None
    assert second is not None
    assert (first.token_ids, first.context_ids, first.text_range) == ((0,), (), (0, 1))
    assert (second.token_ids, second.context_ids, second.text_range) == ((1,), (0,), (1, 6))
    assert (first.text, second.text) == ("a", "😀b")


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        pytest.param([0x80, 0x41], ["\ufffd", "A", ""], id="lone continuation, then ASCII"),
        pytest.param([0xC0, 0x80], ["\ufffd", "\ufffd", ""], id="overlong C0 80"),
        pytest.param([0xED, 0xA0, 0x80], ["", "", "\ufffd\ufffd\ufffd", ""], id="surrogate"),
        pytest.param([0xF0, 0x9F, 0x41], ["", "", "\ufffdA", ""], id="cut short by ASCII"),
        pytest.param([0xF0, 0x9F, 0x98], ["", "", "", "\ufffd"], id="cut short by the end"),
        pytest.param([0xF5, 0xFF], ["\ufffd", "\ufffd", ""], id="never legal"),
    ],
)
def test_d5_invalid_bytes_become_replacement_characters_at_once(
    ids: list[int], texts: list[str]
) -> None:
    table = single_bytes()
    assert feed_each(table, ids) == texts
    assert "".join(texts) == table.decode(ids)


def test_d5_at_most_three_bytes_are_held() -> None:
    detokenizer = IncrementalDetokenizer(single_bytes())
    for value in [*b"\xf0\x9f\x98\x80", *b"\xe2\x82", *b"\xf4\x8f\xbf", 0x80, 0xF4, 0x90, 0xE0]:
        detokenizer.feed([value])
        assert detokenizer.pending_bytes <= 3


def test_d9_a_special_stop_token_removes_no_text() -> None:
    table = TokenBytes([b"Hi", b" there", b"<|eot_id|>"], special_ids=[2])
    assert "".join(feed_each(table, [0, 1, 2])) == "Hi there"


@pytest.mark.parametrize(("skip", "text"), [(True, "Hi"), (False, "<s>Hi</s>")])
def test_d11_streamed_and_whole_text_agree_on_specials(skip: bool, text: str) -> None:
    table = TokenBytes([b"<s>", b"Hi", b"</s>"], special_ids=[0, 2])
    assert "".join(feed_each(table, [0, 1, 2], skip)) == table.decode([0, 1, 2], skip) == text


def test_l7_unknown_ids_have_no_text() -> None:
    table = TokenBytes([b"a", b"b"])
    assert table.get(-1) == table.get(2) == table.get(49_200) == b""
    assert table.decode([0, -1, 7, 1]) == "ab"
    output = OutputText(table)
    assert output.push(-1) is None
    chunk = output.push(0)
    assert chunk is not None
    assert chunk.token_ids == (-1, 0)
    assert output.push(1000) is None
    last = output.finish()
    assert (last.token_ids, last.text) == ((1000,), "")


def test_chunk_text_refuses_an_impossible_range() -> None:
    table = TokenBytes([b"abc"])
    assert chunk_text([], [0], (1, 3), table) == "bc"
    for begin, end in [(-1, 2), (2, 1)]:
        with pytest.raises(InvalidRequestError, match="text_range"):
            chunk_text([], [0], (begin, end), table)


def test_work_does_not_grow_with_the_output() -> None:
    """State after many tokens is as small as after one."""
    detokenizer = IncrementalDetokenizer(single_bytes(b"word "))
    for _ in range(5000):
        detokenizer.feed([256])
    assert detokenizer.pending_bytes == 0
    assert detokenizer.feed([0xF0]) is None
    chunk = detokenizer.finish()
    assert (chunk.token_ids, chunk.context_ids, chunk.text_range) == ((0xF0,), (), (0, 1))


def test_byte_level_alphabet_is_a_bijection_on_bytes() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"]) == (0x20, 0x0A, 0x41)
    assert byte_level_piece("ĠcafÃ©") == " café".encode()
    outside = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    assert byte_level_piece(outside) == outside.encode()


def test_sentencepiece_pieces() -> None:
    assert sentencepiece_piece("<0x0A>") == b"\n"
    assert sentencepiece_piece("<0xfF>") == b"\xff"
    assert sentencepiece_piece("\u2581a\u2581") == b" a "
    assert sentencepiece_piece("<0x0A") == b"<0x0A"
