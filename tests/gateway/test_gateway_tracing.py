"""The gateway's spans and the trace context that goes upstream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_upstream import FakeUpstream, failing
from gateway_server import RunningGateway, call, eventually
from spans import NOT_SAMPLED, PARENT, SAMPLED, TRACE, Spans, parent_id, span_id, trace_id

from pocket_client.gateway.settings import GatewaySettings
from pocket_client.gateway.tracing import (
    SPAN_GATEWAY,
    GatewayTracing,
    tracing_from_environment,
)

CHAT = {"model": "pocketllm", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def traced(upstream: FakeUpstream, spans: Spans) -> Iterator[RunningGateway]:
    with RunningGateway(GatewaySettings(upstream=upstream.address)) as running:
        running.app.state.service.tracing = GatewayTracing(spans.provider)
        yield running


def test_a_request_has_a_span_and_upstream_its_context(
    traced: RunningGateway, upstream: FakeUpstream, spans: Spans
) -> None:
    headers = {**SAMPLED, "X-Request-Id": "mine.1"}
    for stream in (False, True):
        assert call(traced, "POST", PATH, {**CHAT, "stream": stream}, headers).status == 200
    eventually(lambda: len(spans.finished) == 2, "both spans end")
    # A span ends after its answer has gone, perhaps later than the next one: match them by id.
    assert len(upstream.received) == 2
    by_id = {span_id(span): span for span in spans.finished}
    for received in upstream.received:
        span = by_id.pop(received.metadata["traceparent"].split("-")[2])
        assert span.name == SPAN_GATEWAY
        assert (trace_id(span), parent_id(span)) == (TRACE, PARENT)
        assert received.metadata["traceparent"] == f"00-{TRACE}-{span_id(span)}-01"
        assert span.attributes["http.route"] == PATH
        assert span.attributes["http.response.status_code"] == 200
        assert span.attributes["pocketllm.client_request_id"] == "mine.1"


def test_a_trace_begins_here_without_a_context(
    traced: RunningGateway, upstream: FakeUpstream, spans: Spans
) -> None:
    assert call(traced, "POST", PATH, CHAT).status == 200
    eventually(lambda: len(spans.finished) == 1, "the span ends")
    span = spans.one(SPAN_GATEWAY)
    assert parent_id(span) is None
    sent, _, flags = upstream.received[-1].metadata["traceparent"].rpartition("-")
    assert sent == f"00-{trace_id(span)}-{span_id(span)}"
    assert int(flags, 16) & 1  # sampled


def test_upstream_learns_that_a_trace_is_not_sampled(
    traced: RunningGateway, upstream: FakeUpstream, spans: Spans
) -> None:
    assert call(traced, "POST", PATH, CHAT, NOT_SAMPLED).status == 200
    assert upstream.received[-1].metadata["traceparent"].startswith(f"00-{TRACE}-")
    assert upstream.received[-1].metadata["traceparent"].endswith("-00")
    assert call(traced, "GET", "/v1/models").status == 200
    assert call(traced, "GET", "/health").status == 200
    assert spans.finished == ()


def test_a_failure_is_marked(traced: RunningGateway, upstream: FakeUpstream, spans: Spans) -> None:
    upstream.script = failing(("error", "in ensemble 'pocketllm', the engine failed"))
    assert call(traced, "POST", PATH, CHAT).status == 500
    assert call(traced, "POST", PATH, {**CHAT, "max_tokens": "many"}).status == 400
    eventually(lambda: len(spans.finished) == 2, "both spans end")
    code = "http.response.status_code"
    refused, failed = sorted(spans.finished, key=lambda span: span.attributes[code])
    assert failed.status.status_code.name == "ERROR"
    assert failed.attributes["http.response.status_code"] == 500
    assert refused.status.is_unset


def test_the_switch_is_the_environment() -> None:
    assert tracing_from_environment({}) is None
    assert tracing_from_environment({"OTEL_TRACES_EXPORTER": "none"}) is None
    with pytest.raises(ValueError, match="OTEL_TRACES_EXPORTER: got 'pigeon'"):
        tracing_from_environment({"OTEL_TRACES_EXPORTER": "pigeon"})
    with pytest.raises(ValueError, match="POCKETLLM_TRACE_FILE: /nowhere/x"):
        tracing_from_environment({"POCKETLLM_TRACE_FILE": "/nowhere/x"})
