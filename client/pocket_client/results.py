"""What comes back: chunks of a stream, and whole completions. Immutable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's tokens, those taken from the prefix cache; known with the last chunk."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """One increment. The texts of a stream's chunks, joined, are the text of the completion."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on the last chunk, and only there."""
    stop_reason: str | int | None = None
    """The stop string, or the id of ``stop_token_ids``, that ended the text."""
    usage: Usage = field(default_factory=Usage)
    """So far; final with the last chunk."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage


def stop_reason_of(text: str, stop_token_ids: tuple[int, ...]) -> str | int | None:
    """The wire sends ids as decimal text; it is an id only if the request named that id."""
    if not text:
        return None
    if text.isdecimal() and len(text) <= 10 and int(text) in stop_token_ids:
        return int(text)
    return text


class Collector:
    """Adds the chunks of one stream up to its completion."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def add(self, chunk: Chunk) -> Completion | None:
        """Returns the completion with the last chunk."""
        self._texts.append(chunk.text)
        self._token_ids.extend(chunk.token_ids)
        if chunk.finish_reason is None:
            return None
        return Completion(
            self._request_id,
            "".join(self._texts),
            tuple(self._token_ids),
            chunk.finish_reason,
            chunk.stop_reason,
            chunk.usage,
        )
