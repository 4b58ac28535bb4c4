"""The gateway's span of each request to ``/v1/``, and the trace context that goes upstream.

Off, and without cost, unless ``OTEL_TRACES_EXPORTER`` (``otlp`` or ``console``) or
``POCKETLLM_TRACE_FILE`` (one JSON object a line) is set, as for the models behind it
(docs/tracing.md). The OpenTelemetry packages are imported only then. Without spans of its own the
gateway passes a client's context on as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SPAN_GATEWAY = "pocketllm.gateway"
CLOSE_SECONDS = 3.0
_EXPORTERS = ("otlp", "console")


def _nothing() -> None:
    """Nothing to close."""


class GatewaySpan:
    """One request under way."""

    def __init__(self, span: Any, headers: Mapping[str, str]) -> None:
        self.headers = headers
        """W3C context for the requests that it causes."""
        self._span = span

    def end(self, endpoint: str, status: int, request_id: str) -> None:
        self._span.set_attributes(
            {
                "http.request.method": "POST",
                "http.route": endpoint,
                "http.response.status_code": status,
                "pocketllm.client_request_id": request_id,
            }
        )
        if status >= 500:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class GatewayTracing:
    """Belongs to one event loop."""

    def __init__(self, provider: Any, on_close: Callable[[], None] = _nothing) -> None:
        """``provider`` is an SDK ``TracerProvider``; it is shut down by ``close``."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._on_close = on_close
        self._tracer = provider.get_tracer("pocketllm")
        self._propagator = TraceContextTextMapPropagator()
        self._api = trace

    def start(self, headers: Mapping[str, str]) -> GatewaySpan:
        """A span below the context of ``headers`` (names in lower case), or of a new trace.

        Upstream gets a context also if the trace is not sampled: it says so.
        """
        span = self._tracer.start_span(
            SPAN_GATEWAY,
            context=self._propagator.extract(headers),
            kind=self._api.SpanKind.SERVER,
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._api.set_span_in_context(span))
        return GatewaySpan(span, carrier)

    def close(self) -> None:
        """Export what is left and stop, in ``CLOSE_SECONDS``: a collector that does not answer must
        not hold up a shutdown."""
        closer = threading.Thread(target=self._close, name="gateway-spans-close", daemon=True)
        closer.start()
        closer.join(CLOSE_SECONDS)

    def _close(self) -> None:
        self._provider.shutdown()
        self._on_close()


def tracing_from_environment(environ: Mapping[str, str]) -> GatewayTracing | None:
    """None unless the environment asks for spans.

    Raises:
        ValueError: an unknown exporter, a file that cannot be opened, or packages that are missing.
    """
    path = environ.get("POCKETLLM_TRACE_FILE", "")
    kind = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if not path and kind in ("", "none"):
        return None
    if not path and kind not in _EXPORTERS:
        raise ValueError(
            f"OTEL_TRACES_EXPORTER: got {kind!r}; must be none, {' or '.join(_EXPORTERS)}"
        )
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        if not path and kind == "otlp":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ValueError(
            f"spans were asked for and {error.name} is not installed: "
            "pip install 'pocketllm[tracing]'"
        ) from None
    on_close: Callable[[], None] = _nothing
    if path:
        try:
            file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"POCKETLLM_TRACE_FILE: {path}: {error.strerror}") from None
        exporter = ConsoleSpanExporter(out=file, formatter=_line)
        on_close = file.close
    elif kind == "otlp":
        exporter = OTLPSpanExporter()
    else:
        exporter = ConsoleSpanExporter(formatter=_line)
    name = environ.get("OTEL_SERVICE_NAME") or "pocketllm-gateway"
    resource = Resource.create({"service.name": name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # ``close`` does it
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return GatewayTracing(provider, on_close)


def _line(span: Any) -> str:
    return f"{span.to_json(indent=None)}\n"
