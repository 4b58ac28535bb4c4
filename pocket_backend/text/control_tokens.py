"""Keeps control tokens out of the hands of whoever writes chat messages.

A chat template concatenates strings, so a message that spells ``<|im_end|>`` could end its own turn
and open another. Before rendering, every occurrence in a client's strings is put between two marks;
after rendering, control tokens outside marks are the template's own and become ids, and everything
else is encoded as ordinary text. Marks surround the token and leave it whole, so templates that
search their messages still find it.

A mark is a random word of ASCII letters and digits: JSON and Python's ``repr``, which templates
apply to tools and arguments, would escape an unusual character and so lose it.

A string that ends (or begins) with part of a control token gets one mark there, so that two
strings next to each other cannot form one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken


@dataclass(frozen=True, slots=True)
class Marks:
    """Words that one request's strings do not hold, and whether its strings were marked at all."""

    begin: str
    end: str
    open_end: str
    """Free for the end of a message that is to be continued."""
    used: bool


class ControlTokenGuard:
    """Immutable; safe from any thread."""

    def __init__(self, control: Mapping[int, AddedToken]) -> None:
        self._ids = {token.content: token_id for token_id, token in control.items()}
        self._tokens = {token.content: token for token in control.values()}
        # Longest first, as `tokenizers` matches added tokens.
        spelled = sorted(self._ids, key=lambda content: (-len(content), content))
        self._pattern = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        heads = {content[:cut] for content in spelled for cut in range(1, len(content))}
        tails = {content[cut:] for content in spelled for cut in range(1, len(content))}
        self._heads, self._tails = frozenset(heads), frozenset(tails)
        self._longest = max(map(len, spelled), default=1) - 1
        self._first = frozenset(content[0] for content in spelled)
        self._last = frozenset(content[-1] for content in spelled)

    def protect(self, value: object) -> tuple[object, Marks]:
        """``value`` (plain JSON data) with every control token in its strings marked."""
        strings = list(_strings(value))
        nonce = secrets.token_hex(8)
        while any(nonce in text for text in strings):
            nonce = secrets.token_hex(8)
        used = any(self._suspicious(text) for text in strings)
        marks = Marks(f"B{nonce}", f"E{nonce}", f"O{nonce}", used)
        if not used:
            return value, marks
        return self._mark(value, marks), marks

    def split(self, rendered: str, marks: Marks) -> list[int | str]:
        """The rendered text as ids of the template's own control tokens and text in between.

        An added token may take the whitespace beside it (its ``lstrip`` and ``rstrip``).
        """
        begin, end, pattern = marks.begin, marks.end, self._pattern.pattern
        scanner = re.compile(
            f"{begin}(?P<quoted>{pattern}){end}|{begin}|{end}|(?P<control>{pattern})"
        )
        pieces: list[int | str] = []
        text: list[str] = []
        position, eat = 0, False

        def flush(strip_right: bool) -> None:
            joined = "".join(text)
            text.clear()
            joined = joined.lstrip() if eat else joined
            joined = joined.rstrip() if strip_right else joined
            if joined:
                pieces.append(joined)

        for match in scanner.finditer(rendered):
            text.append(rendered[position : match.start()])
            position = match.end()
            content = match.group("control")
            if content is None:
                text.append(match.group("quoted") or "")
                continue
            flush(self._tokens[content].lstrip)
            pieces.append(self._ids[content])
            eat = self._tokens[content].rstrip
        text.append(rendered[position:])
        flush(strip_right=False)
        return pieces

    def _suspicious(self, text: str) -> bool:
        core = text.strip()
        return (
            self._pattern.search(core) is not None
            or self._part_at_start(core)
            or self._part_at_end(core)
        )

    def _part_at_end(self, text: str) -> bool:
        # A proper beginning of a control token must hold that token's first character.
        tail = text[-self._longest :] if self._longest else ""
        return any(
            char in self._first and tail[index:] in self._heads for index, char in enumerate(tail)
        )

    def _part_at_start(self, text: str) -> bool:
        head = text[: self._longest]
        return any(
            char in self._last and head[: index + 1] in self._tails
            for index, char in enumerate(head)
        )

    def _mark(self, value: object, marks: Marks) -> object:
        if isinstance(value, str):
            return self._mark_text(value, marks)
        if isinstance(value, dict):
            # Names that templates look up spell no control token, so they stay as they are.
            return {
                self._mark_text(key, marks): self._mark(item, marks) for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._mark(item, marks) for item in value]
        return value

    def _mark_text(self, text: str, marks: Marks) -> str:
        core = text.strip()  # templates may trim, and so join what spaces kept apart
        if not core:
            return text
        start = text.index(core)
        marked = self._pattern.sub(f"{marks.begin}\\g<0>{marks.end}", core)
        if self._part_at_start(core):
            marked = marks.begin + marked
        if self._part_at_end(core):
            marked += marks.end
        return text[:start] + marked + text[start + len(core) :]


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
