"""What comes back: chunks of a stream, and whole completions. Immutable."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pocket_client.logprobs import TokenLogprobs

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
    """One increment of an output. The texts of an output's chunks, joined, are its text."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on an output's last chunk, and only there."""
    stop_reason: str | int | None = None
    """The stop string, or the id of ``stop_token_ids``, that ended the text."""
    usage: Usage = field(default_factory=Usage)
    """Of this output so far; final with its last chunk."""
    index: int = 0
    """Which of the request's ``n`` outputs this belongs to."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if asked for."""
    cumulative_logprob: float | None = None
    """Of this output so far, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One per token of the prompt, if asked for, on the first chunk; the first token has none."""
    timings: Mapping[str, float] | None = None
    """Seconds by name (docs/triton.md), if asked for, on an output's last chunk."""


@dataclass(frozen=True, slots=True)
class Output:
    """One finished output; a request has ``n`` of them."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float | None = None
    timings: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. The properties are those of its first output: the only one by default."""

    request_id: str
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob

    @property
    def timings(self) -> Mapping[str, float] | None:
        return self.outputs[0].timings

    @property
    def usage(self) -> Usage:
        """Of all outputs; the prompt counts once."""
        first = self.outputs[0].usage
        tokens = sum(output.usage.completion_tokens for output in self.outputs)
        return Usage(first.prompt_tokens, tokens, first.cached_tokens)


def stop_reason_of(text: str, stop_token_ids: tuple[int, ...]) -> str | int | None:
    """The wire sends ids as decimal text; it is an id only if the request named that id."""
    if not text:
        return None
    if text.isdecimal() and len(text) <= 10 and int(text) in stop_token_ids:
        return int(text)
    return text


class Arrivals:
    """Chunks that a transport has received and not handed on, and whether more have to come."""

    def __init__(self, outputs: int) -> None:
        self._open = outputs
        self._ready: deque[Chunk] = deque()

    def add(self, chunks: Sequence[Chunk]) -> None:
        self._ready.extend(chunks)

    def take(self) -> Chunk | None:
        """The next chunk; None: none is here."""
        if not self._ready:
            return None
        chunk = self._ready.popleft()
        self._open -= chunk.finish_reason is not None
        return chunk

    @property
    def finished(self) -> bool:
        """Whether the last chunk of the last output was taken."""
        return self._open <= 0


class Collector:
    """Adds the chunks of one stream up to its completion."""

    def __init__(self, request_id: str, outputs: int = 1) -> None:
        self._request_id = request_id
        self._chunks: list[list[Chunk]] = [[] for _ in range(outputs)]
        self._open = outputs

    def add(self, chunk: Chunk) -> Completion | None:
        """Returns the completion with the last chunk of the last output."""
        self._chunks[chunk.index].append(chunk)
        if chunk.finish_reason is None:
            return None
        self._open -= 1
        if self._open:
            return None
        outputs = tuple(_output(index, chunks) for index, chunks in enumerate(self._chunks))
        prompt = [item for chunk in self._chunks[0] for item in chunk.prompt_logprobs]
        return Completion(self._request_id, outputs, tuple(prompt))


def _output(index: int, chunks: Sequence[Chunk]) -> Output:
    last = chunks[-1]
    assert last.finish_reason is not None
    return Output(
        index,
        "".join([chunk.text for chunk in chunks]),
        tuple([token for chunk in chunks for token in chunk.token_ids]),
        last.finish_reason,
        last.stop_reason,
        last.usage,
        tuple([item for chunk in chunks for item in chunk.logprobs]),
        last.cumulative_logprob,
        last.timings,
    )
