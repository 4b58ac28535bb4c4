"""Spans in memory: what the SDK's exporter kept, by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `tracing`")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    ParentBased,
    Sampler,
)

TRACE, PARENT = "a" * 32, "b" * 16
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


class Spans:
    """A provider without network or threads. Roots are sampled if ``roots`` says so; whatever has a
    parent is if that was."""

    def __init__(self, *, roots: bool = True) -> None:
        self._exporter = InMemorySpanExporter()
        root: Sampler = ALWAYS_ON if roots else ALWAYS_OFF
        self.provider = TracerProvider(sampler=ParentBased(root), shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def finished(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.finished if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span


def trace_id(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}"


def span_id(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


def parent_id(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"
