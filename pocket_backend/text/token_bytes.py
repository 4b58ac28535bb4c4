"""Table from token id to the bytes that the token stands for.

Text is defined through this table alone (docs/architecture.md, Text rule): never through a
library's ``decode``, whose result for one id depends on its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pocket_backend.text.token_index import TokenIndex

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "\u2581"
"""SentencePiece's spelling of a space."""


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the other 68
    byte values for U+0100 and up, in order.

    Source: the ``bytes_to_unicode`` convention of the GPT-2 release.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in printable}
    others = (value for value in range(256) if chr(value) not in alphabet)
    alphabet.update({chr(0x100 + i): value for i, value in enumerate(others)})
    return alphabet


_ALPHABET = byte_level_alphabet()


def byte_level_piece(piece: str) -> bytes:
    """Bytes of a byte-level BPE piece; a piece outside the alphabet stands for its UTF-8."""
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "surrogatepass")


def sentencepiece_piece(piece: str) -> bytes:
    """Bytes of a SentencePiece piece: ``<0xNN>`` is one byte, U+2581 a space."""
    if len(piece) == 6 and (match := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(match.group(1), 16)])
    return piece.replace(SPACE_MARK, " ").encode("utf-8", "surrogatepass")


class TokenBytes:
    """Immutable table (its indexes are made on demand); reading it is safe from any thread.

    Ids outside the table (padding of the logits, -1) stand for no bytes.
    """

    __slots__ = ("_all", "_indexes", "_visible", "special_ids", "strip_leading_space")

    def __init__(
        self,
        table: Sequence[bytes],
        special_ids: Iterable[int] = (),
        *,
        strip_leading_space: bool = False,
    ) -> None:
        """``table[id]`` are the bytes of a token, a special token's included (its content).

        ``strip_leading_space``: one space at the very start of a text is the tokenizer's own and is
        not shown (SentencePiece's leading-space rule).
        """
        self.special_ids = frozenset(special_ids)
        self.strip_leading_space = strip_leading_space
        self._indexes: dict[bool, TokenIndex] = {}
        self._all = tuple(table)
        self._visible = tuple(
            b"" if token in self.special_ids else data for token, data in enumerate(self._all)
        )

    def __len__(self) -> int:
        return len(self._all)

    def table(self, skip_special_tokens: bool = True) -> tuple[bytes, ...]:
        """The whole table; with ``skip_special_tokens`` special tokens are empty in it."""
        return self._visible if skip_special_tokens else self._all

    def index(self, skip_special_tokens: bool = True) -> TokenIndex:
        """An index of ``table``, built when first asked for (twice, at worst, by two threads)."""
        found = self._indexes.get(skip_special_tokens)
        if found is None:
            found = self._indexes[skip_special_tokens] = TokenIndex(self.table(skip_special_tokens))
        return found

    def get(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """Bytes of one token; ``b""`` for an id that the tokenizer does not have."""
        if 0 <= token_id < len(self._all):
            return (self._visible if skip_special_tokens else self._all)[token_id]
        return b""

    def join(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> bytes:
        """Bytes of a run of tokens, its leading space included."""
        table = self._visible if skip_special_tokens else self._all
        size = len(table)
        return b"".join([table[token] for token in token_ids if 0 <= token < size])

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole output; bytes that are not UTF-8 become U+FFFD."""
        data = self.join(token_ids, skip_special_tokens)
        if self.strip_leading_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")
