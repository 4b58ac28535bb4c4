"""Increments of an answer as the generator's output tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pocket_backend.api import SamplingParams, TimingMetrics, TokenEvent, TokenLogprob
from pocket_backend.text.token_bytes import TokenBytes
from pocket_backend.triton import codec
from pocket_backend.triton.logprobs import logprobs_json

OUTPUTS = (
    ("token_ids", "TYPE_INT32", "-1"),
    ("context_ids", "TYPE_INT32", "-1"),
    ("text_range", "TYPE_INT32", "-1"),
    ("skip_special_tokens", "TYPE_BOOL", "1"),
    ("stream_key", "TYPE_STRING", "1"),
    ("finish_reason", "TYPE_STRING", "-1"),
    ("stop_reason", "TYPE_STRING", "-1"),
    ("num_input_tokens", "TYPE_UINT32", "1"),
    ("num_output_tokens", "TYPE_UINT32", "-1"),
    ("num_cached_tokens", "TYPE_UINT32", "1"),
    ("sequence_index", "TYPE_INT32", "-1"),
    ("cumulative_logprob", "TYPE_FP32", "-1"),
    ("logprobs", "TYPE_STRING", "-1"),
    ("prompt_logprobs", "TYPE_STRING", "-1"),
    ("timings", "TYPE_STRING", "-1"),
    ("error", "TYPE_STRING", "1"),
    ("control_result", "TYPE_STRING", "1"),
)
"""Outputs of the generator (name, data type, dims)."""


@dataclass(frozen=True, slots=True)
class Increment:
    """The parts of a ``TokenEvent`` that reach a client; see the text rule for the first three."""

    token_ids: tuple[int, ...]
    context_ids: tuple[int, ...]
    text_range: tuple[int, int]
    finish_reason: str = ""
    """Empty until the last increment of its output."""
    stop_reason: str = ""
    cached_tokens: int = 0
    error: str = ""
    """Set in the last increment of a failed request whose errors travel as a tensor."""
    sequence_index: int = 0
    """Which of the request's ``n`` outputs."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    timings: TimingMetrics | None = None

    @classmethod
    def of(cls, event: TokenEvent) -> Increment:
        return cls(
            event.token_ids,
            event.context_ids,
            event.text_range,
            event.finish_reason or "",
            "" if event.stop_reason is None else str(event.stop_reason),
            event.usage.cached_tokens if event.usage is not None else 0,
            sequence_index=event.choice_index,
            logprobs=event.logprobs,
            prompt_logprobs=event.prompt_logprobs,
            timings=event.timings,
        )

    def merge(self, following: Increment) -> Increment:
        """This increment and the next one of the same output as one: released bytes are contiguous,
        so the range grows by the length of the next one's."""
        begin, end = self.text_range
        more = following.text_range[1] - following.text_range[0]
        return replace(
            following,
            token_ids=self.token_ids + following.token_ids,
            context_ids=self.context_ids,
            text_range=(begin, end + more),
            logprobs=self.logprobs + following.logprobs,
            prompt_logprobs=self.prompt_logprobs + following.prompt_logprobs,
        )


class IncrementSum:
    """Adds the increments of one output up to one that gives its whole text (``stream=false``)."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._begin: int | None = None
        self._size = 0
        self.whole: Increment | None = None
        """The sum, once the last increment was added."""

    def add(self, increment: Increment) -> None:
        """The first increment has no context, and released bytes are contiguous, so the sum of the
        ranges' lengths, counted from the first one's begin, covers exactly what was released."""
        self._token_ids.extend(increment.token_ids)
        self._logprobs.extend(increment.logprobs)
        self._prompt_logprobs += increment.prompt_logprobs
        begin, end = increment.text_range
        if self._begin is None:
            self._begin = begin
        self._size += end - begin
        if increment.finish_reason:
            self.whole = replace(
                increment,
                token_ids=tuple(self._token_ids),
                context_ids=(),
                text_range=(self._begin, self._begin + self._size),
                logprobs=tuple(self._logprobs),
                prompt_logprobs=self._prompt_logprobs,
            )


class ChunkWriter:
    """Writes one request's increments; builds only the outputs that were requested.

    Making a tensor costs more than anything else here, so those that are the same in most responses
    are made once per request and sent again.
    """

    def __init__(
        self,
        pb_utils: Any,
        requested: frozenset[str],
        stream_key: str,
        prompt_tokens: int,
        sampling: SamplingParams,
        *,
        timings: bool = False,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        self._pb = pb_utils
        self._requested = requested or frozenset(name for name, _, _ in OUTPUTS)
        self._timings = timings
        self._token_bytes = token_bytes
        self._skip_special_tokens = sampling.skip_special_tokens
        self._sent = [0] * sampling.n
        self._cumulative = [0.0] * sampling.n
        self._constant = self._wanted(
            codec.text(pb_utils, "stream_key", stream_key),
            codec.uint32(pb_utils, "num_input_tokens", prompt_tokens),
            codec.boolean(pb_utils, "skip_special_tokens", sampling.skip_special_tokens),
        )
        self._logprobs = sampling.logprobs is not None
        if not self._logprobs:
            self._constant += self._no_logprobs()
        self._open = self._wanted(
            *self._state(("",), ("",), 0),
            codec.texts(pb_utils, "timings", ()),
            codec.text(pb_utils, "error", ""),
        )
        """Outputs that only an output's last response changes."""
        self._no_context = self._wanted(codec.int32(pb_utils, "context_ids", ()))
        self._no_prompt = self._wanted(codec.texts(pb_utils, "prompt_logprobs", ()))
        self._indexes = [
            self._wanted(codec.int32(pb_utils, "sequence_index", (i,))) for i in range(sampling.n)
        ]

    def replace_key(self, stream_key: str) -> None:
        """The stream key of the responses from now on."""
        self._constant = [
            codec.text(self._pb, "stream_key", stream_key) if t.name() == "stream_key" else t
            for t in self._constant
        ]

    def response(self, *increments: Increment) -> Any:
        """One increment, or the whole of several outputs in one response.

        ``num_output_tokens`` and ``cumulative_logprob`` count an output's tokens so far, this
        increment's included.
        """
        pb = self._pb
        for increment in increments:
            index = increment.sequence_index
            self._sent[index] += len(increment.token_ids)
            if increment.logprobs:
                self._cumulative[index] += math.fsum(item.logprob for item in increment.logprobs)
        first = increments[0]
        tensors = [
            *self._constant,
            *self._wanted(
                codec.int32(pb, "token_ids", [i for part in increments for i in part.token_ids]),
                codec.int32(pb, "text_range", self._ranges(increments)),
                codec.uint32(
                    pb, "num_output_tokens", *(self._sent[i.sequence_index] for i in increments)
                ),
            ),
        ]
        if len(increments) == 1:
            tensors += self._indexes[first.sequence_index]
        else:
            indexes = [increment.sequence_index for increment in increments]
            tensors += self._wanted(codec.int32(pb, "sequence_index", indexes))
        if first.context_ids:
            tensors += self._wanted(codec.int32(pb, "context_ids", first.context_ids))
        else:
            tensors += self._no_context
        if first.prompt_logprobs:
            text = logprobs_json(first.prompt_logprobs, self._token_bytes)
            tensors += self._wanted(codec.texts(pb, "prompt_logprobs", (text,)))
        else:
            tensors += self._no_prompt
        if self._logprobs:
            tensors += self._with_logprobs(increments)
        tensors += self._end(increments) if first.finish_reason or first.error else self._open
        return pb.InferenceResponse(tensors)

    def _end(self, increments: Sequence[Increment]) -> list[Any]:
        first = increments[0]
        times = [i.timings for i in increments if i.timings is not None and self._timings]
        return self._wanted(
            *self._state(
                [increment.finish_reason for increment in increments],
                [increment.stop_reason for increment in increments],
                first.cached_tokens,
            ),
            codec.texts(self._pb, "timings", [json.dumps(item.as_dict()) for item in times]),
            codec.text(self._pb, "error", first.error),
        )

    def _ranges(self, increments: Sequence[Increment]) -> list[int]:
        """[begin, end) of each output's text in the bytes of all their ids."""
        ranges: list[int] = []
        offset = 0
        for increment in increments:
            begin, end = increment.text_range
            ranges += (offset + begin, offset + end)
            if len(increments) > 1 and self._token_bytes is not None:
                skip = self._skip_special_tokens
                offset += len(self._token_bytes.join(increment.token_ids, skip))
        return ranges

    def _with_logprobs(self, increments: Sequence[Increment]) -> list[Any]:
        texts = [logprobs_json(part.logprobs, self._token_bytes) for part in increments]
        sums = [self._cumulative[part.sequence_index] for part in increments]
        return self._wanted(
            codec.texts(self._pb, "logprobs", texts),
            codec.float32(self._pb, "cumulative_logprob", sums),
        )

    def _no_logprobs(self) -> list[Any]:
        return self._wanted(
            codec.texts(self._pb, "logprobs", ()), codec.float32(self._pb, "cumulative_logprob", ())
        )

    def _state(
        self, finish_reasons: Sequence[str], stop_reasons: Sequence[str], cached_tokens: int
    ) -> list[Any]:
        return [
            codec.texts(self._pb, "finish_reason", finish_reasons),
            codec.texts(self._pb, "stop_reason", stop_reasons),
            codec.uint32(self._pb, "num_cached_tokens", cached_tokens),
        ]

    def _wanted(self, *tensors: Any) -> list[Any]:
        return [tensor for tensor in tensors if tensor.name() in self._requested]
