"""Bad words by bytes: exactly the tokens that would complete one are banned."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocket_backend.api import InvalidRequestError
from pocket_backend.text.bad_words import BadWordFilter, BadWords
from pocket_backend.text.token_bytes import TokenBytes
from pocket_backend.text.token_index import TokenIndex

# Few letters, so that pieces overlap in every way; bytes that are no UTF-8 among them.
_PIECES = st.lists(st.binary(max_size=4).map(lambda b: bytes(b"ab\xff\xc3"[c % 4] for c in b)))
_WORDS = st.lists(st.text("abé\u00ff", min_size=1, max_size=5), min_size=1, max_size=3)


@given(pieces=_PIECES, part=st.binary(min_size=1, max_size=3))
def test_index_equals_a_walk_over_the_table(pieces: list[bytes], part: bytes) -> None:
    part = bytes(b"ab\xff\xc3"[c % 4] for c in part)
    index = TokenIndex(pieces)
    assert sorted(index.holding(part)) == [i for i, data in enumerate(pieces) if part in data]
    starting = [i for i, data in enumerate(pieces) if data.startswith(part)]
    assert sorted(index.beginning_with(part)) == starting


@given(pieces=_PIECES, words=_WORDS, seed=st.integers(0, 1000))
def test_banned_is_exactly_what_completes_a_word(
    pieces: list[bytes], words: list[str], seed: int
) -> None:
    pieces = [*pieces, b"a", b"b", b"\xc3", b"\xa9", b"\xbf", b"ab"]
    rng = random.Random(seed)
    needles = [word.encode() for word in words]
    following = BadWordFilter(BadWords(words, TokenBytes(pieces)))
    output = b""
    for _ in range(12):
        banned = {*following.always, *following.banned()}
        completing = {
            token
            for token, data in enumerate(pieces)
            if data and any(needle in (output + data) for needle in needles)
        }
        assert banned == completing
        allowed = [token for token in range(len(pieces)) if token not in banned]
        if not allowed:
            return
        token = rng.choice(allowed)
        output += pieces[token]
        following.push(token)


def test_special_tokens_count_only_where_they_are_shown() -> None:
    table = TokenBytes([b"<end>", b"<", b"end>", b"x"], special_ids=[0])
    hidden = BadWordFilter(BadWords(["<end>"], table))
    shown = BadWordFilter(BadWords(["<end>"], table, skip_special_tokens=False))
    assert (hidden.always, shown.always) == ((), (0,))
    hidden.push(1)
    hidden.push(-1)
    hidden.push(10_000)
    assert hidden.banned() == (2,)


def test_a_word_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="bad_words"):
        BadWords(["\ud800"], TokenBytes([b"a"]))
