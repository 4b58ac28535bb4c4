"""The output stage of one request: tokens in, text, usage, timings and ``TokenEvent`` out.

Runs on the engine thread, once per token. Text follows the rule of docs/architecture.md through
``text.OutputText``; without a tokenizer every token is its own event and there is no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pocket_backend.api import (
    GenerationRequest,
    SamplingParams,
    TimingMetrics,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from pocket_backend.text.bad_words import BadWordFilter, BadWords
from pocket_backend.text.incremental import TextChunk
from pocket_backend.text.output import OutputText

if TYPE_CHECKING:
    from pocket_backend.api import FinishReason
    from pocket_backend.core.step import TokenLogprobs
    from pocket_backend.text.token_bytes import TokenBytes


@dataclass(slots=True)
class RequestTimes:
    """When things happened, on the engine's clock (seconds); None: not yet."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None

    def metrics(self, output_tokens: int) -> TimingMetrics:
        """The standard latencies (names.py defines them); of an unfinished request: zeros."""
        end = self.finished if self.finished is not None else self.arrival
        scheduled = self.first_scheduled if self.first_scheduled is not None else end
        first = self.first_token if self.first_token is not None else end
        last = self.last_token if self.last_token is not None else first
        decode = max(0.0, last - first)
        return TimingMetrics(
            queue_seconds=max(0.0, scheduled - self.arrival),
            prefill_seconds=max(0.0, first - scheduled),
            decode_seconds=decode,
            total_seconds=max(0.0, end - self.arrival),
            ttft_seconds=max(0.0, first - self.arrival) if self.first_token is not None else 0.0,
            tpot_seconds=decode / (output_tokens - 1) if output_tokens > 1 else 0.0,
        )


class RequestOutput:
    """Output state of one choice of a request. Engine thread only, once made."""

    __slots__ = (
        "_logprobs",
        "_prompt_ids",
        "_prompt_logprobs",
        "_text",
        "bad_words",
        "cached_tokens",
        "choice_index",
        "error",
        "finish_reason",
        "finished",
        "num_tokens",
        "params",
        "prompt_tokens",
        "request_id",
        "times",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerationRequest,
        arrival: float,
        token_bytes: TokenBytes | None,
        choice_index: int = 0,
        bad_words: BadWords | None = None,
    ) -> None:
        params: SamplingParams = request.sampling_params
        self.request_id = request.request_id
        self.choice_index = choice_index
        self.finished = False
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.params = params
        self.prompt_tokens = len(request.prompt_tokens)
        self.cached_tokens = 0
        self.num_tokens = 0
        self.times = RequestTimes(arrival)
        self._text = None if token_bytes is None else OutputText.for_params(token_bytes, params)
        self._logprobs: list[TokenLogprob] = []
        self.bad_words = None if bad_words is None else BadWordFilter(bad_words)
        """What may not come next; None: anything may."""
        # By position; None also means not computed yet. Dropped once reported.
        self._prompt_ids = request.prompt_tokens
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        if params.prompt_logprobs is not None and choice_index == 0:
            self._prompt_logprobs = [None] * self.prompt_tokens

    def push_prompt(self, first: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take log probabilities of the prompt's tokens at positions ``first`` and on.

        A step that is repeated brings the same ones again.
        """
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[first : first + len(logprobs)] = [
                _token_logprob(token, item)
                for token, item in zip(self._prompt_ids[first:], logprobs, strict=False)
            ]

    def push(
        self, token_id: int, now: float, logprobs: TokenLogprobs | None = None
    ) -> TokenEvent | None:
        """Take the next output token; returns the event to deliver, if text became free.

        ``stop_string`` is set afterwards if this token completed one.
        """
        self.num_tokens += 1
        times = self.times
        if times.first_token is None:
            times.first_token = now
        times.last_token = now
        if self.bad_words is not None:
            self.bad_words.push(token_id)
        if logprobs is not None and self.params.logprobs is not None:
            self._logprobs.append(_token_logprob(token_id, logprobs))
        if self._text is None:
            chunk: TextChunk | None = TextChunk((token_id,), (), (0, 0), "")
        else:
            chunk = self._text.push(token_id)
        return None if chunk is None else self._event(chunk)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._text is None else self._text.stopped

    def finish(
        self,
        reason: FinishReason,
        now: float,
        *,
        stop_reason: str | int | None = None,
        error: Exception | None = None,
        pending: TokenEvent | None = None,
        last: bool = True,
    ) -> TokenEvent:
        """This choice's last event: what was held back, usage and timings. Call once.

        ``pending`` is the event of this step's ``push``; it becomes part of the last one.
        """
        self.finished = True
        self.finish_reason = reason
        self.error = error
        self.times.finished = now
        if self._text is None:
            tail = self._event(TextChunk((), (), (0, 0), ""))
        else:
            tail = self._event(self._text.finish())
        return replace(
            tail if pending is None else merge_events(pending, tail),
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=self.usage(),
            timings=self.times.metrics(self.num_tokens),
            error=error,
            last=last,
        )

    def give_up(self, error: Exception, now: float, *, last: bool) -> TokenEvent:
        """The last event when ``finish`` itself failed: no text, but an end."""
        self.finished = True
        self.finish_reason = "error"
        self.error = error
        self.times.finished = now
        return TokenEvent(
            request_id=self.request_id,
            token_ids=(),
            finish_reason="error",
            usage=self.usage(),
            timings=self.times.metrics(self.num_tokens),
            error=error,
            choice_index=self.choice_index,
            last=last,
        )

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.num_tokens, self.cached_tokens)

    def _event(self, chunk: TextChunk) -> TokenEvent:
        # The first fields by position: this runs per token.
        event = TokenEvent(
            self.request_id, chunk.token_ids, chunk.text, chunk.context_ids, chunk.text_range,
            choice_index=self.choice_index,
        )  # fmt: skip
        if self._logprobs:
            event.logprobs = self._take_logprobs(len(chunk.token_ids))
        if self._prompt_logprobs is not None:
            event.prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), None
        return event

    def _take_logprobs(self, count: int) -> tuple[TokenLogprob, ...]:
        taken = tuple(self._logprobs[:count])
        del self._logprobs[:count]
        return taken


def _token_logprob(token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(token_id, logprobs.token_logprob, logprobs.top or {})


def merge_events(first: TokenEvent, second: TokenEvent) -> TokenEvent:
    """Two consecutive increments as one (the same rule as ``TextChunk.merge``)."""
    begin, end = first.text_range
    return TokenEvent(
        request_id=first.request_id,
        token_ids=first.token_ids + second.token_ids,
        text=first.text + second.text,
        context_ids=first.context_ids,
        text_range=(begin, end + second.text_range[1] - second.text_range[0]),
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        choice_index=first.choice_index,
    )
