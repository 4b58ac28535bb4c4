"""What ``tritonserver`` is told about tracing: to pass the context on, and to send its own spans.

Its own spans are off unless ``POCKETLLM_TRITON_TRACE_RATE`` is set: Triton takes one request in
that many, whether or not the client's trace is sampled, so it has a switch of its own. It takes a
client's W3C context as the models do, so its spans are in the same trace as theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

from pocket_backend.api.errors import ConfigurationError

RATE_VARIABLE = "POCKETLLM_TRITON_TRACE_RATE"
SERVICE_NAME = "pocketllm-triton"
_ENDPOINT = "http://localhost:4318"
"""OTLP over HTTP, as the OpenTelemetry SDKs have it."""
_TRACE_HEADERS = "(?i)^(traceparent|tracestate)$"
"""gRPC metadata that become request parameters: the W3C trace context. (Triton's generate endpoints
forward no HTTP headers, whatever it is told; there the context is a key of the JSON body.)"""


def trace_options(environ: Mapping[str, str]) -> list[str]:
    """Arguments for ``tritonserver``.

    Raises:
        ConfigurationError: the rate is not a positive whole number.
    """
    forward = f"--grpc-header-forward-pattern={_TRACE_HEADERS}"
    text = environ.get(RATE_VARIABLE, "").strip()
    if not text:
        return [forward]
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ConfigurationError(
            f"{RATE_VARIABLE} is {text!r}: give the number of requests of which one is traced "
            "(1: all), or unset it"
        )
    url = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    if not url:
        url = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "") or _ENDPOINT
        url = f"{url.rstrip('/')}/v1/traces"
    settings = [
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        f"rate={int(text)}",
        f"opentelemetry,url={url}",
        f"opentelemetry,resource=service.name={SERVICE_NAME}",
    ]
    if delay := environ.get("OTEL_BSP_SCHEDULE_DELAY", ""):
        settings.append(f"opentelemetry,bsp_schedule_delay={delay}")
    return [forward, *(f"--trace-config={setting}" for setting in settings)]
