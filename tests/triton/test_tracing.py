"""One trace through gateway, generator and detokenizer: three processes' spans of one request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_server import RunningGateway, call, eventually
from spans import PARENT, SAMPLED, TRACE, Spans, span_id
from triton_clients import generate, wait_for

from pocket_backend.observability import names
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports
from pocket_client.gateway.settings import GatewaySettings
from pocket_client.gateway.tracing import SPAN_GATEWAY, GatewayTracing

OF_A_REQUEST = {
    names.SPAN_REQUEST,
    names.SPAN_QUEUE,
    names.SPAN_PREFILL,
    names.SPAN_DECODE,
    names.SPAN_DETOKENIZE,
}


class SpanFile:
    """What the server's processes wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, trace: str) -> dict[str, dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found = [json.loads(line) for line in lines]
        return {span["name"]: span for span in found if span["context"]["trace_id"] == f"0x{trace}"}

    def complete(self, trace: str) -> dict[str, dict[str, Any]]:
        wait_for(lambda: self.of(trace).keys() >= OF_A_REQUEST, what="all spans are written")
        return self.of(trace)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, SpanFile]]:
    folder = tmp_path_factory.mktemp("traced")
    file = SpanFile(folder / "spans.jsonl")
    options = ServerOptions(
        "fake",
        ports=Ports(0, 0, 0),
        log_file=folder / "server.log",
        stop_timeout=5,
        environment={"POCKETLLM_TRACE_FILE": str(file.path), "OTEL_BSP_SCHEDULE_DELAY": "100"},
    )
    with TritonServer(options) as running:
        yield running, file


def test_one_request_is_one_trace(traced: tuple[TritonServer, SpanFile]) -> None:
    server, file = traced
    spans = Spans()
    with RunningGateway(GatewaySettings(upstream=server.grpc_address)) as gateway:
        gateway.app.state.service.tracing = GatewayTracing(spans.provider)
        body = {"model": "pocketllm", "prompt": "hello", "max_tokens": 8}
        reply = call(gateway, "POST", "/v1/completions", body, {**SAMPLED, "X-Request-Id": "e2e"})
        assert reply.status == 200
        eventually(lambda: bool(spans.named(SPAN_GATEWAY)), "the gateway's span ends")
    outer = spans.one(SPAN_GATEWAY)
    found = file.complete(TRACE)
    request = found[names.SPAN_REQUEST]
    for name in (names.SPAN_REQUEST, names.SPAN_DETOKENIZE):
        assert found[name]["parent_id"] == f"0x{span_id(outer)}"
    for name in (names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DECODE):
        assert found[name]["parent_id"] == request["context"]["span_id"]
    assert request["attributes"]["gen_ai.usage.output_tokens"] == 8
    assert found[names.SPAN_DETOKENIZE]["attributes"]["pocketllm.tokens"] == 8
    services = {span["resource"]["attributes"]["service.name"] for span in found.values()}
    assert services == {"pocketllm-generator", "pocketllm-detokenizer"}


def test_a_body_carries_the_context_over_http(traced: tuple[TritonServer, SpanFile]) -> None:
    server, file = traced
    trace = "c" * 32
    body = {"text_input": "hello", "max_tokens": 3, "traceparent": f"00-{trace}-{PARENT}-01"}
    assert generate(server.http_url, body).num_output_tokens == 3
    found = file.complete(trace)
    assert found[names.SPAN_REQUEST]["parent_id"] == f"0x{PARENT}"
    assert found[names.SPAN_DETOKENIZE]["attributes"]["pocketllm.chunks"] == 1
