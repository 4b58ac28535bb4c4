"""Exact matching of stop strings in a stream of bytes.

Matching works on UTF-8: a valid needle can only match at character boundaries, so this equals
matching on characters, whatever tokens the text came in.

*Which match*: the one that is complete first, as if the text came character by character; of
several that end together, the longest. So the result does not depend on tokenization.

*Cost*: one Knuth-Morris-Pratt automaton per string, its failure table extended only as far as the
text has matched: nothing is built up front, and a byte costs amortised constant work per string.
"""

from __future__ import annotations

from collections.abc import Sequence

from pocket_backend.api.errors import InvalidRequestError


class _Pattern:
    """One stop string's automaton. ``matched`` bytes at the end of the text are its prefix."""

    __slots__ = ("failure", "matched", "needle", "text")

    def __init__(self, text: str) -> None:
        try:
            self.needle = text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequestError.of(
                "stop", text, "each must be a string of Unicode characters (no lone surrogates)"
            ) from None
        if not self.needle:
            raise InvalidRequestError.of("stop", text, "each must have at least one character")
        self.text = text
        self.matched = 0
        # failure[i]: length of the longest proper border of needle[:i + 1].
        self.failure = [0]

    def advance(self, data: bytes, honour: bool) -> int:
        """Read ``data``; return the index after the first match's last byte, or -1.

        Without ``honour`` complete matches are passed over.
        """
        needle, state, index, size = self.needle, self.matched, 0, len(data)
        while index < size:
            if state == 0:
                index = data.find(needle[0], index)
                if index < 0:
                    break
            byte = data[index]
            while state and needle[state] != byte:
                state = self._border(state)
            if needle[state] == byte:
                state += 1
            index += 1
            if state == len(needle):
                if honour:
                    self.matched = state
                    return index
                state = self._border(state)
        self.matched = state
        return -1

    def _border(self, length: int) -> int:
        failure, needle = self.failure, self.needle
        while len(failure) < length:
            border, byte = failure[-1], needle[len(failure)]
            while border and needle[border] != byte:
                border = failure[border - 1]
            failure.append(border + 1 if needle[border] == byte else 0)
        return failure[length - 1]


class StopMatcher:
    """Matches several stop strings in one stream. Not shared between threads.

    Raises:
        InvalidRequestError: a stop string is empty or not Unicode text.
    """

    __slots__ = ("_patterns", "hold")

    def __init__(self, stop: Sequence[str]) -> None:
        self._patterns = [_Pattern(text) for text in dict.fromkeys(stop)]
        self.hold = 0
        """Bytes at the end of the text that may still become a stop string."""

    def advance(self, data: bytes, *, honour: bool = True) -> tuple[str, int] | None:
        """Read the next bytes; return the stop string and the index in ``data`` after its last byte
        once one is complete. After that the matcher is spent."""
        best: tuple[int, int, str] | None = None
        hold = 0
        for pattern in self._patterns:
            end = pattern.advance(data, honour)
            if end < 0:
                hold = max(hold, pattern.matched)
            elif best is None or (end, -len(pattern.needle)) < best[:2]:
                best = (end, -len(pattern.needle), pattern.text)
        self.hold = hold
        return None if best is None else (best[2], best[0])
