"""Spans of the Triton models: their set-up, and the detokenizer's.

The generator's are made by ``engine/tracing.py``. The detokenizer has one span per stream, over all
of its chunks: it sees a stream's chunks one by one, with other streams' between them, so
the span lasts from the first chunk's begin to the last one's end; how long it worked is an
attribute. It belongs to the W3C context that the request brought, beside ``pocketllm.request``:
without a context it would belong nowhere, and there is none.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pocket_backend.api import ConfigurationError
from pocket_backend.observability import names
from pocket_backend.observability.tracing import span_writer
from pocket_backend.triton import codec
from pocket_backend.triton.fields import TRACE_PARAMETERS

if TYPE_CHECKING:
    from pocket_backend.observability.tracing import SpanWriter

MAX_OPEN = 4096
"""Streams that are remembered; one whose end never came is ended when it is the oldest of more."""


def spans_of(model: str) -> SpanWriter | None:
    """Where ``model`` writes spans, if the environment asks for them.

    Raises:
        ConfigurationError: it asks for what cannot be had.
    """
    try:
        return span_writer(f"pocketllm-{model}", os.environ)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def trace_context(request: Any) -> dict[str, str]:
    """The W3C context among a request's parameters, by its names in lower case."""
    return {
        name.lower(): value
        for name, value in codec.read_parameters(request).items()
        if name.lower() in TRACE_PARAMETERS and isinstance(value, str)
    }


@dataclass(slots=True)
class _Open:
    span: Any | None
    """None: not sampled."""
    chunks: int = 0
    tokens: int = 0
    busy: int = 0
    """Nanoseconds."""
    ended: int = 0
    """When the last chunk was done."""


class DetokenizeSpans:
    """One thread."""

    def __init__(self, writer: SpanWriter, *, now: Callable[[], int] = time.time_ns) -> None:
        """``now`` is in nanoseconds since the epoch."""
        self._writer = writer
        self._now = now
        self._streams: OrderedDict[str, _Open] = OrderedDict()

    def begin(self) -> int:
        """Before a chunk; pass what it returns to ``chunk``."""
        return self._now()

    def chunk(
        self, key: str, carrier: Mapping[str, str], began: int, tokens: int, *, last: bool
    ) -> None:
        """A chunk of the stream ``key`` is done."""
        stream = self._streams.get(key)
        if stream is None:
            if "traceparent" not in carrier:
                return
            span = self._writer.start(names.SPAN_DETOKENIZE, carrier, began)
            if last and span is None:
                return
            stream = self._streams[key] = _Open(span)
            if len(self._streams) > MAX_OPEN:
                self._end(self._streams.popitem(last=False)[1])
        stream.chunks += 1
        stream.tokens += tokens
        stream.ended = self._now()
        stream.busy += stream.ended - began
        if last:
            self._end(self._streams.pop(key))

    def close(self) -> None:
        """End what is open, and export."""
        while self._streams:
            self._end(self._streams.popitem()[1])
        self._writer.close()

    def _end(self, stream: _Open) -> None:
        if stream.span is not None:
            stream.span.set_attributes(
                {
                    "pocketllm.chunks": stream.chunks,
                    "pocketllm.tokens": stream.tokens,
                    "pocketllm.busy_seconds": stream.busy / 1e9,
                }
            )
            self._writer.end(stream.span, stream.ended)
