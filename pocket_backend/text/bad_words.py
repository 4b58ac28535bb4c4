"""Words that an output must not hold: which tokens may not come next.

The rule is about text, not about one tokenization of it: a token is banned exactly when it would
complete a bad word, whichever tokens the word's beginning came from. Other systems ban the last
token of the word's own tokenization, which another split of the same letters walks around.
"""

from __future__ import annotations

from collections.abc import Sequence

from pocket_backend.api.errors import InvalidRequestError
from pocket_backend.text.token_bytes import TokenBytes


class BadWords:
    """The bad words of one request, compiled. Immutable; one ``BadWordFilter`` per output."""

    __slots__ = ("always", "longest", "rests", "table")

    def __init__(
        self, words: Sequence[str], token_bytes: TokenBytes, *, skip_special_tokens: bool = True
    ) -> None:
        """Raises InvalidRequestError: a word is not Unicode text (lone surrogates)."""
        index = token_bytes.index(skip_special_tokens)
        self.table = token_bytes.table(skip_special_tokens)
        needles = [_encoded(word) for word in dict.fromkeys(words)]
        self.longest = max(map(len, needles), default=0)
        always: set[int] = set()
        # Last byte of a word's beginning -> (beginning, ids that begin with the word's rest).
        self.rests: dict[int, list[tuple[bytes, tuple[int, ...]]]] = {}
        for needle in needles:
            always.update(index.holding(needle))
            for size in range(1, len(needle)):
                if ids := index.beginning_with(needle[size:]):
                    self.rests.setdefault(needle[size - 1], []).append((needle[:size], ids))
        self.always = tuple(sorted(always))
        """Ids of tokens that hold a bad word by themselves."""


class BadWordFilter:
    """Follows one output. Not shared between threads."""

    __slots__ = ("_tail", "_words")

    def __init__(self, words: BadWords) -> None:
        self._words = words
        self._tail = b""

    def push(self, token_id: int) -> None:
        """Take the next output token."""
        words = self._words
        if 0 <= token_id < len(words.table) and words.longest > 1:
            self._tail = (self._tail + words.table[token_id])[1 - words.longest :]

    @property
    def always(self) -> tuple[int, ...]:
        """Ids that may never come."""
        return self._words.always

    def banned(self) -> tuple[int, ...]:
        """Further ids that may not come next: they would complete a word that has begun."""
        tail = self._tail
        if not tail:
            return ()
        found: set[int] = set()
        for beginning, ids in self._words.rests.get(tail[-1], ()):
            if tail.endswith(beginning):
                found.update(ids)
        return tuple(found)


def _encoded(word: str) -> bytes:
    try:
        return word.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError.of(
            "bad_words", word, "each must be a string of Unicode characters (no lone surrogates)"
        ) from None
