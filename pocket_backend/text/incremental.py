"""Text from token ids as they come, cut so that the pieces join to the whole.

Released bytes are cut only where a UTF-8 decoder holds nothing back, so decoding each piece by
itself (invalid bytes become U+FFFD) equals decoding the whole output at once. Work per token is
proportional to its own bytes.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pocket_backend.api.errors import InvalidRequestError
from pocket_backend.text.token_bytes import TokenBytes


@dataclass(slots=True)
class TextChunk:
    """One increment of an output. Not changed once made.

    Not frozen, since one is made per token and a frozen one costs three times as much to make.

    ``text`` is ``bytes(context_ids + token_ids)[begin:end]`` as UTF-8 with replacement, where
    ``(begin, end) = text_range`` counts bytes; ``chunk_text`` computes it from the other fields.
    """

    token_ids: tuple[int, ...]
    """Tokens that no earlier chunk has reported; those of a stream's chunks join to its output."""
    context_ids: tuple[int, ...]
    """Reported before, with bytes left to release: at most one token."""
    text_range: tuple[int, int]
    text: str

    def merge(self, following: TextChunk) -> TextChunk:
        """This chunk and the next one of the same stream as one chunk."""
        begin, end = self.text_range
        more = following.text_range[1] - following.text_range[0]
        return TextChunk(
            self.token_ids + following.token_ids,
            self.context_ids,
            (begin, end + more),
            self.text + following.text,
        )


def chunk_text(
    context_ids: Sequence[int],
    token_ids: Sequence[int],
    text_range: tuple[int, int],
    token_bytes: TokenBytes,
    skip_special_tokens: bool = True,
) -> str:
    """The text of a chunk, without any state.

    Raises:
        InvalidRequestError: ``text_range`` is not ``0 <= begin <= end``.
    """
    [text] = chunk_texts(context_ids, token_ids, [text_range], token_bytes, skip_special_tokens)
    return text


def chunk_texts(
    context_ids: Sequence[int],
    token_ids: Sequence[int],
    text_ranges: Iterable[tuple[int, int]],
    token_bytes: TokenBytes,
    skip_special_tokens: bool = True,
) -> list[str]:
    """The texts at several ranges of the same bytes: what the detokenizer model calls.

    Raises:
        InvalidRequestError: a range is not ``0 <= begin <= end``.
    """
    data = token_bytes.join(context_ids, skip_special_tokens)
    data += token_bytes.join(token_ids, skip_special_tokens)
    texts = []
    for begin, end in text_ranges:
        if not 0 <= begin <= end:
            raise InvalidRequestError.of("text_range", (begin, end), "must be 0 <= begin <= end")
        texts.append(data[begin:end].decode("utf-8", "replace"))
    return texts


class IncrementalDetokenizer:
    """Turns one sequence's token ids into chunks. Not shared between threads.

    ``push`` or ``feed``, and ``finish``, suffice where nothing else holds text back; ``append``,
    ``release`` and ``close`` are their parts, for an owner that matches stop strings in between.
    """

    __slots__ = (
        "_at_start",
        "_begin",
        "_context",
        "_incomplete",
        "_pending",
        "_sizes",
        "_strip",
        "_table",
        "_tokens",
    )

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._table = token_bytes.table(skip_special_tokens)
        self._strip = token_bytes.strip_leading_space
        self._at_start = True
        # Unreported tokens with their byte counts; the context token, if any, precedes them.
        self._tokens: list[int] = []
        self._sizes: list[int] = []
        self._context: tuple[int, int] | None = None
        # Bytes before _begin, counted from the context token or else the first unreported one, were
        # released (or are the hidden leading space); _pending are those from _begin on.
        self._begin = 0
        self._pending = b""
        # The last 0 to 3 bytes of _pending: a character that later bytes may complete.
        self._incomplete = b""

    @property
    def pending_bytes(self) -> int:
        """Bytes that were appended and not released."""
        return len(self._pending)

    def push(self, token_id: int) -> TextChunk | None:
        """Take one token and return the text that it completes, if there is any.

        The same as ``feed`` of one token. Nearly all tokens are whole characters that find nothing
        held back: they pass by the buffers.
        """
        if not self._tokens and self._context is None and not self._at_start:
            table = self._table
            data = table[token_id] if 0 <= token_id < len(table) else b""
            text, complete = utf_8_decode(data, "replace", False)
            if data and complete == len(data):
                return TextChunk((token_id,), (), (0, complete), text)
        self.append(token_id)
        return self.release()

    def feed(self, token_ids: Iterable[int]) -> TextChunk | None:
        """Take tokens and return the text that they complete, if there is any."""
        for token in token_ids:
            self.append(token)
        return self.release()

    def finish(self) -> TextChunk:
        """The rest; an incomplete character at the end becomes U+FFFD. May be empty."""
        return self.close()

    def append(self, token_id: int) -> bytes:
        """Take one token; return its visible bytes (without a hidden leading space)."""
        table = self._table
        data = table[token_id] if 0 <= token_id < len(table) else b""
        self._tokens.append(token_id)
        self._sizes.append(len(data))
        if data and self._at_start:
            self._at_start = False
            if self._strip and data[0] == 0x20:
                self._begin = 1
                data = data[1:]
        if not data:
            return data
        self._pending += data
        tail = self._incomplete + data
        if tail[-1] < 0x80:
            self._incomplete = b""
        else:
            _, complete = utf_8_decode(tail, "replace", False)
            self._incomplete = tail[complete:]
        return data

    def release(self, hold: int = 0) -> TextChunk | None:
        """Release what is complete, but not the last ``hold`` bytes.

        ``hold`` must end at a character's first byte, counted from the end; None when no text is
        free.
        """
        free = len(self._pending) - max(hold, len(self._incomplete))
        return self._cut(free) if free > 0 else None

    def close(self, drop: int = 0) -> TextChunk:
        """The last chunk: everything but the last ``drop`` bytes, with all unreported tokens."""
        free = len(self._pending) - drop
        begin, text = self._begin, self._pending[:free].decode("utf-8", "replace")
        context = () if self._context is None else (self._context[0],)
        chunk = TextChunk(tuple(self._tokens), context, (begin, begin + free), text)
        self._tokens, self._sizes, self._context = [], [], None
        self._begin, self._pending, self._incomplete = 0, b"", b""
        return chunk

    def _cut(self, free: int) -> TextChunk:
        begin, end = self._begin, self._begin + free
        text = self._pending[:free].decode("utf-8", "replace")
        self._pending = self._pending[free:]
        context = () if self._context is None else (self._context[0],)
        if not self._pending:
            tokens = tuple(self._tokens)
            self._tokens, self._sizes, self._context, self._begin = [], [], None, 0
            return TextChunk(tokens, context, (begin, end), text)
        # Report the tokens up to the one that holds the last released byte; when bytes of that one
        # are left, it becomes the next chunk's context.
        position = 0 if self._context is None else self._context[1]
        last, size = self._context if self._context is not None else (0, 0)
        count = 0
        while position < end:
            last, size = self._tokens[count], self._sizes[count]
            position += size
            count += 1
        tokens = tuple(self._tokens[:count])
        del self._tokens[:count], self._sizes[:count]
        if position > end:
            self._context, self._begin = (last, size), size - (position - end)
        else:
            self._context, self._begin = None, 0
        return TextChunk(tokens, context, (begin, end), text)
