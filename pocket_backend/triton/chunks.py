"""One increment of a stream as the generator's output tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pocket_backend.api import TokenEvent
from pocket_backend.triton import codec

OUTPUTS = (
    ("token_ids", "TYPE_INT32", "-1"),
    ("context_ids", "TYPE_INT32", "-1"),
    ("text_range", "TYPE_INT32", "2"),
    ("skip_special_tokens", "TYPE_BOOL", "1"),
    ("stream_key", "TYPE_STRING", "1"),
    ("finish_reason", "TYPE_STRING", "1"),
    ("stop_reason", "TYPE_STRING", "1"),
    ("num_input_tokens", "TYPE_UINT32", "1"),
    ("num_output_tokens", "TYPE_UINT32", "1"),
    ("num_cached_tokens", "TYPE_UINT32", "1"),
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
    """Empty until the last increment."""
    stop_reason: str = ""
    cached_tokens: int = 0
    error: str = ""
    """Set in the last increment of a failed request whose errors travel as a tensor."""

    @classmethod
    def of(cls, event: TokenEvent) -> Increment:
        return cls(
            event.token_ids,
            event.context_ids,
            event.text_range,
            event.finish_reason or "",
            "" if event.stop_reason is None else str(event.stop_reason),
            event.usage.cached_tokens if event.usage is not None else 0,
        )

    def merge(self, following: Increment) -> Increment:
        """This increment and the next one of the same stream as one: released bytes are contiguous,
        so the range grows by the length of the next one's."""
        begin, end = self.text_range
        more = following.text_range[1] - following.text_range[0]
        return replace(
            following,
            token_ids=self.token_ids + following.token_ids,
            context_ids=self.context_ids,
            text_range=(begin, end + more),
        )


class IncrementSum:
    """Adds increments up to one that gives the whole text, for ``stream=false``."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._begin: int | None = None
        self._size = 0

    def add(self, increment: Increment) -> Increment:
        """Returns the sum so far.

        The first increment has no context, and released bytes are contiguous, so the sum of the
        ranges' lengths, counted from the first one's begin, covers exactly what was released.
        """
        self._token_ids.extend(increment.token_ids)
        begin, end = increment.text_range
        if self._begin is None:
            self._begin = begin
        self._size += end - begin
        return Increment(
            tuple(self._token_ids) if increment.finish_reason else (),
            (),
            (self._begin, self._begin + self._size),
            increment.finish_reason,
            increment.stop_reason,
            increment.cached_tokens,
        )


class ChunkWriter:
    """Writes one stream's increments; builds only the outputs that were requested.

    Making a tensor costs more than anything else here, so those that are the same in most responses
    are made once per stream and sent again.
    """

    def __init__(
        self,
        pb_utils: Any,
        requested: frozenset[str],
        stream_key: str,
        prompt_tokens: int,
        skip_special_tokens: bool,
    ) -> None:
        self._pb = pb_utils
        self._requested = requested or frozenset(name for name, _, _ in OUTPUTS)
        self._sent = 0
        self._constant = self._wanted(
            codec.text(pb_utils, "stream_key", stream_key),
            codec.uint32(pb_utils, "num_input_tokens", prompt_tokens),
            codec.boolean(pb_utils, "skip_special_tokens", skip_special_tokens),
        )
        self._open = self._wanted(*self._state(""), codec.text(pb_utils, "error", ""))
        """Outputs that only the last response changes."""
        self._no_context = self._wanted(codec.int32(pb_utils, "context_ids", ()))

    def response(self, increment: Increment) -> Any:
        """``num_output_tokens`` counts all tokens sent so far, this increment's included."""
        pb = self._pb
        self._sent += len(increment.token_ids)
        tensors = [
            *self._constant,
            *self._wanted(
                codec.int32(pb, "token_ids", increment.token_ids),
                codec.int32(pb, "text_range", increment.text_range),
                codec.uint32(pb, "num_output_tokens", self._sent),
            ),
        ]
        if increment.context_ids:
            tensors += self._wanted(codec.int32(pb, "context_ids", increment.context_ids))
        else:
            tensors += self._no_context
        if increment.finish_reason or increment.error:
            tensors += self._wanted(
                *self._state(
                    increment.finish_reason, increment.stop_reason, increment.cached_tokens
                ),
                codec.text(pb, "error", increment.error),
            )
        else:
            tensors += self._open
        return pb.InferenceResponse(tensors)

    def _state(
        self, finish_reason: str, stop_reason: str = "", cached_tokens: int = 0
    ) -> list[Any]:
        return [
            codec.text(self._pb, "finish_reason", finish_reason),
            codec.text(self._pb, "stop_reason", stop_reason),
            codec.uint32(self._pb, "num_cached_tokens", cached_tokens),
        ]

    def _wanted(self, *tensors: Any) -> list[Any]:
        return [tensor for tensor in tensors if tensor.name() in self._requested]
