"""The options that let Triton send its own spans."""

from __future__ import annotations

import pytest

from pocket_backend.api import ConfigurationError
from pocket_backend.triton.trace_options import RATE_VARIABLE, trace_options


def test_off_unless_asked_for() -> None:
    """The context is passed on in any case."""
    for environ in ({"OTEL_TRACES_EXPORTER": "otlp"}, {RATE_VARIABLE: ""}):
        (only,) = trace_options(environ)
        assert only.startswith("--grpc-header-forward-pattern=")
        assert "traceparent" in only


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://localhost:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1/"}, "http://c:1/v1/traces"),
        (
            {
                "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d:2/x",
            },
            "http://d:2/x",
        ),
    ],
)
def test_the_endpoint_is_that_of_the_sdk(environ: dict[str, str], url: str) -> None:
    options = trace_options({RATE_VARIABLE: "100", **environ})
    assert f"--trace-config=opentelemetry,url={url}" in options
    assert "--trace-config=rate=100" in options
    assert not any("delay" in option for option in options)
    delayed = trace_options({RATE_VARIABLE: "1", "OTEL_BSP_SCHEDULE_DELAY": "100"})
    assert "--trace-config=opentelemetry,bsp_schedule_delay=100" in delayed


@pytest.mark.parametrize("rate", ["0", "-1", "0.5", "all"])
def test_a_rate_that_is_none_is_named(rate: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{RATE_VARIABLE} is '{rate}'.*1: all"):
        trace_options({RATE_VARIABLE: rate})
