"""Requests and results as users see them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Literal

from pocket_backend.api.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]

_EMPTY: Mapping[str, object] = MappingProxyType({})
_EMPTY_TOP: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. ``cached_tokens`` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total_tokens": self.total_tokens}


@dataclass(frozen=True, slots=True)
class TimingMetrics:
    """Seconds. TTFT counts from arrival; TPOT is the mean after the first token."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    total_seconds: float = 0.0
    ttft_seconds: float = 0.0
    tpot_seconds: float = 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> TimingMetrics:
        """From ``as_dict`` or any mapping with some of its names; others are ignored."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: float(value) for name, value in values.items() if name in known})  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt as token ids, with how to continue it.

    ``deadline_seconds`` counts from arrival and covers queueing and generation. ``cache_salt``
    separates prefix-cache namespaces. Lower ``priority`` values are served first.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    deadline_seconds: float | None = None
    cache_salt: str = ""
    metadata: Mapping[str, object] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one output token, and of the likeliest alternatives if asked."""

    token_id: int
    logprob: float
    top: Mapping[int, float] = field(default_factory=lambda: _EMPTY_TOP)


@dataclass(slots=True)
class TokenEvent:
    """One increment of a stream: some tokens and the text that they complete. Not to be changed.

    Not frozen, since one is made per token and a frozen one costs eight times as much to make.

    ``text`` is a delta: the texts of a stream joined give the final text. Tokens whose text is held
    back (an incomplete character, a possible stop string) arrive with the event that releases it.
    ``context_ids`` and ``text_range`` let a stateless decoder produce the same delta (text rule of
    docs/architecture.md); both are empty when the engine has no tokenizer.

    The last event of a choice, and only that one, has ``finish_reason``; it always has ``usage``
    and ``timings`` (of that choice) and may carry tokens. A choice that ended with
    ``finish_reason="error"`` has ``error`` there, one of ``pocket_backend.api.errors``. The last
    event of the whole request has ``last``; with n = 1 that is the one with ``finish_reason``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str = ""
    context_ids: tuple[int, ...] = ()
    """Earlier ids whose bytes had not all been released."""
    text_range: tuple[int, int] = (0, 0)
    """``bytes(context_ids + token_ids)[begin:end]`` are the bytes of ``text``."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token of ``token_ids`` when the request asked for them."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """One per prompt token, with the first event of choice 0, when the request asked for them; the
    first token has none, since nothing precedes it."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the stream, if one did."""
    usage: Usage | None = None
    timings: TimingMetrics | None = None
    error: Exception | None = None
    choice_index: int = 0
    last: bool = False

    @property
    def token_id(self) -> int | None:
        """The newest of ``token_ids``; None if there is none."""
        return self.token_ids[-1] if self.token_ids else None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished choice of a request (the only one, unless ``n`` was above 1)."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: TimingMetrics
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    choice_index: int = 0
    metadata: Mapping[str, object] = field(default_factory=lambda: _EMPTY)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """As ``TokenEvent.prompt_logprobs``; of choice 0."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Log probability of the whole output; None unless ``logprobs`` were asked for."""
        return math.fsum(item.logprob for item in self.logprobs) if self.logprobs else None
