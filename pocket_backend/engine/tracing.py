"""Requests as OpenTelemetry spans: ``pocketllm.request`` with queue, prefill and decode below it.

Sampled requests are known by id from ``start`` on; the step hook notes their prefill chunks, and
makes the spans when a request has ended. An engine without a tracer has no such hook.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pocket_backend.observability import names

if TYPE_CHECKING:
    from pocket_backend.engine.entries import RequestEntry, StepReport
    from pocket_backend.engine.output import RequestOutput
    from pocket_backend.observability.tracing import SpanEvent, SpanWriter


_MAX_ID = 256
"""Longest id written: a client chooses it."""


@dataclass(slots=True)
class _Chunk:
    began: float
    ended: float
    start: int
    tokens: int


@dataclass(slots=True)
class _Traced:
    span: Any
    shift: int
    """From the engine's clock to nanoseconds since the epoch: one for all times of a request, so
    that they are in order whatever the system's clock does."""
    chunks: list[_Chunk] = field(default_factory=list)


class RequestTracer:
    """See the module. ``start`` and ``refused`` from any thread, ``after_step`` on the engine's."""

    def __init__(self, writer: SpanWriter, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is the engine's."""
        self._writer = writer
        self._clock = clock
        self._open: dict[str, _Traced] = {}

    def start(
        self, request_id: str, carrier: Mapping[str, str], client_request_id: str = ""
    ) -> bool:
        """A request arrives; ``carrier`` may hold the W3C context that it belongs to.

        Its spans end with it; of a request that the engine refuses, ``refused`` has to tell.
        Returns whether it is sampled.
        """
        clock = int(self._clock() * 1e9)
        begin = time.time_ns()
        span = self._writer.start(names.SPAN_REQUEST, carrier, begin)
        if span is None:
            return False
        span.set_attribute("pocketllm.request_id", request_id)
        if client_request_id:
            span.set_attribute("pocketllm.client_request_id", client_request_id[:_MAX_ID])
        self._open[request_id] = _Traced(span, begin - clock)
        return True

    def refused(self, request_id: str, error: BaseException) -> None:
        """The engine did not take the request."""
        traced = self._open.pop(request_id, None)
        if traced is not None:
            self._writer.end(traced.span, time.time_ns(), type(error).__name__)

    def after_step(self, report: StepReport) -> None:
        """The step hook."""
        if not self._open:
            return
        if report.plan is not None and not report.failed:
            for asked in report.plan.requests:
                if asked.is_prefill and (traced := self._open.get(asked.request_id)) is not None:
                    traced.chunks.append(
                        _Chunk(
                            report.began, report.ended, asked.start_position, len(asked.token_ids)
                        )
                    )
        for entry in report.finished:
            traced = self._open.pop(entry.request.request_id, None)
            if traced is not None:
                self._finish(traced, entry)

    def close(self) -> None:
        """Export what is left. The engine has ended, so nothing is open any more."""
        self._writer.close()

    def _finish(self, traced: _Traced, entry: RequestEntry) -> None:
        def wall(seconds: float) -> int:
            return int(seconds * 1e9) + traced.shift

        first = entry.outputs[0]
        times, span, writer = first.times, traced.span, self._writer
        ended = max(output.times.finished or times.arrival for output in entry.outputs)
        admitted = ended if times.first_scheduled is None else times.first_scheduled
        writer.child(span, names.SPAN_QUEUE, wall(times.arrival), wall(admitted))
        first_token = ended if times.first_token is None else times.first_token
        if times.first_scheduled is not None:
            chunks = [chunk for chunk in traced.chunks if chunk.ended <= first_token]
            writer.child(
                span,
                names.SPAN_PREFILL,
                wall(admitted),
                wall(first_token),
                {
                    "pocketllm.chunks": len(chunks),
                    "pocketllm.computed_tokens": sum(chunk.tokens for chunk in chunks),
                    "pocketllm.cached_tokens": first.cached_tokens,
                },
                [_event("chunk", chunk, wall) for chunk in chunks],
            )
        for output in entry.outputs:
            again = [chunk for chunk in traced.chunks if chunk.ended > first_token]
            self._decode(span, output, again, wall)
        _describe(span, entry)
        errors = [type(output.error).__name__ for output in entry.outputs if output.error]
        writer.end(span, wall(ended), errors[0] if errors else "")

    def _decode(
        self,
        span: Any,
        output: RequestOutput,
        again: list[_Chunk],
        wall: Callable[[float], int],
    ) -> None:
        times = output.times
        if times.first_token is None or times.last_token is None:
            return
        self._writer.child(
            span,
            names.SPAN_DECODE,
            wall(times.first_token),
            wall(times.last_token),
            {
                "pocketllm.choice": output.choice_index,
                "gen_ai.usage.output_tokens": output.num_tokens,
            },
            [_event("recomputed chunk", chunk, wall) for chunk in again],
        )


def _event(name: str, chunk: _Chunk, wall: Callable[[float], int]) -> SpanEvent:
    about = {
        "start_position": chunk.start,
        "tokens": chunk.tokens,
        "seconds": chunk.ended - chunk.began,
    }
    return (name, wall(chunk.began), about)


def _describe(span: Any, entry: RequestEntry) -> None:
    """Counts and reasons, by OpenTelemetry's names for generative models where it has some."""
    outputs = entry.outputs
    span.set_attributes(
        {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.usage.input_tokens": outputs[0].prompt_tokens,
            "gen_ai.usage.output_tokens": sum(output.num_tokens for output in outputs),
            "gen_ai.response.finish_reasons": [output.finish_reason or "" for output in outputs],
            "pocketllm.cached_tokens": outputs[0].cached_tokens,
            "pocketllm.priority": entry.request.priority,
        }
    )
