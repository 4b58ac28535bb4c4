"""OpenTelemetry spans: a ``SpanWriter`` if the operator asked for spans, else None and no cost.

``OTEL_TRACES_EXPORTER`` is the switch: ``otlp`` or ``console``; unset or ``none`` is off.
``POCKETLLM_TRACE_FILE`` writes spans to a file instead, one JSON object a line. Sampler, service
name, endpoint and batching follow the standard variables (``OTEL_TRACES_SAMPLER``,
``OTEL_SERVICE_NAME``, ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_BSP_*``) that the SDK reads itself.

The packages (extra ``tracing``) are imported only when the switch is on. Spans never hold prompts
or outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
FILE_VARIABLE = "POCKETLLM_TRACE_FILE"
CLOSE_SECONDS = 3.0
_EXPORTERS = ("otlp", "console")

Attributes = Mapping[str, str | int | float | bool]
SpanEvent = tuple[str, int, Attributes]
"""Name, time in nanoseconds since the epoch, attributes."""


def _nothing() -> None:
    """Nothing to close."""


class SpanWriter:
    """Makes spans with explicit times (nanoseconds since the epoch). Any thread."""

    def __init__(self, provider: Any, on_close: Callable[[], None] = _nothing) -> None:
        """``provider`` is an SDK ``TracerProvider``; it is shut down by ``close``."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._on_close = on_close
        self._tracer = provider.get_tracer("pocketllm")
        self._propagator = TraceContextTextMapPropagator()
        self._api = trace

    def start(
        self,
        name: str,
        carrier: Mapping[str, str],
        begin: int,
        attributes: Attributes | None = None,
    ) -> Any | None:
        """A span below the W3C context in ``carrier`` (``traceparent``, ``tracestate``; without it,
        or if it is malformed, the root of a new trace). None if the trace is not sampled.
        """
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(carrier),
            kind=self._api.SpanKind.SERVER,
            attributes=attributes,
            start_time=begin,
        )
        return span if span.is_recording() else None

    def child(
        self,
        parent: Any,
        name: str,
        begin: int,
        end: int,
        attributes: Attributes | None = None,
        events: Iterable[SpanEvent] = (),
    ) -> None:
        """A whole span below ``parent``."""
        span = self._tracer.start_span(
            name,
            context=self._api.set_span_in_context(parent),
            attributes=attributes,
            start_time=begin,
        )
        for event, when, about in events:
            span.add_event(event, about, timestamp=when)
        span.end(end_time=end)

    def end(self, span: Any, end: int, error: str = "") -> None:
        """End a started span; ``error`` is the kind of failure, never its message, which may repeat
        part of a request."""
        if error:
            span.set_attribute("error.type", error)
            span.set_status(self._api.StatusCode.ERROR)
        span.end(end_time=end)

    def close(self) -> None:
        """Export what is left and stop, in ``CLOSE_SECONDS``: a collector that does not answer must
        not hold up a shutdown."""
        closer = threading.Thread(target=self._close, name="pocket-spans-close", daemon=True)
        closer.start()
        closer.join(CLOSE_SECONDS)

    def _close(self) -> None:
        self._provider.shutdown()
        self._on_close()


def span_writer(service: str, environ: Mapping[str, str]) -> SpanWriter | None:
    """What the environment asks for. ``service`` is the name unless ``OTEL_SERVICE_NAME`` is set.

    Raises:
        ValueError: an unknown exporter, a file that cannot be opened, or packages that are missing;
            the message names the variable and the remedy.
    """
    path = environ.get(FILE_VARIABLE, "")
    kind = environ.get(EXPORTER_VARIABLE, "").strip().lower()
    if not path and kind in ("", "none"):
        return None
    if not path and kind not in _EXPORTERS:
        raise ValueError(
            f"{EXPORTER_VARIABLE}: got {kind!r}; must be none, {' or '.join(_EXPORTERS)}"
        )
    variable = FILE_VARIABLE if path else EXPORTER_VARIABLE
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        if not path and kind == "otlp":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ValueError(
            f"{variable} is set and {error.name} is not installed: pip install 'pocketllm[tracing]'"
        ) from None
    on_close: Callable[[], None] = _nothing
    if path:
        file = _open(path)
        on_close = file.close
        exporter = ConsoleSpanExporter(out=file, formatter=_line)
    elif kind == "otlp":
        exporter = OTLPSpanExporter()
    else:
        exporter = ConsoleSpanExporter(formatter=_line)
    name = environ.get("OTEL_SERVICE_NAME") or service
    resource = Resource.create({"service.name": name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # ``close`` does it
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return SpanWriter(provider, on_close)


def _line(span: Any) -> str:
    return f"{span.to_json(indent=None)}\n"


def _open(path: str) -> IO[str]:
    try:
        # By line, so that the lines of several processes do not mix.
        return Path(path).open("a", buffering=1, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{FILE_VARIABLE}: {path}: {error.strerror}") from None
