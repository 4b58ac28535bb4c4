"""A real collector's view: gateway, Triton, generator and detokenizer in one trace, over OTLP."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from otlp_sink import OtlpSink, Received
from spans import PARENT, SAMPLED, TRACE
from triton_clients import wait_for

from pocket_backend.observability import names
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports
from pocket_backend.triton.trace_options import RATE_VARIABLE, SERVICE_NAME
from pocket_client.gateway.tracing import SPAN_GATEWAY

TRITONS = {"InferRequest", "pocketllm", "tokenizer", "generator", "detokenizer"}
OURS = {
    SPAN_GATEWAY,
    names.SPAN_REQUEST,
    names.SPAN_QUEUE,
    names.SPAN_PREFILL,
    names.SPAN_DECODE,
    names.SPAN_DETOKENIZE,
}


@contextmanager
def gateway(upstream: str, environment: dict[str, str]) -> Iterator[int]:
    """A gateway process; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pocket_client.gateway", "--upstream", upstream]
    with subprocess.Popen(
        [*command, "--port", str(port)], env={**os.environ, **environment}
    ) as process:
        try:
            wait_for(lambda: answers(port), 60, "the gateway")
            yield port
        finally:
            process.terminate()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def stream(port: int) -> int:
    """Pieces of text of one streamed completion in the trace ``TRACE``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "pocketllm", "prompt": "hello", "max_tokens": 6, "stream": True}
    headers = {"Content-Type": "application/json", **SAMPLED}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    lines = [line for line in response.read().split(b"\n") if line.startswith(b"data: {")]
    connection.close()
    return len(lines)


@pytest.mark.slow
def test_all_processes_of_a_request_are_in_one_trace(tmp_path: Path) -> None:
    with OtlpSink() as sink:
        environment = {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": sink.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            RATE_VARIABLE: "1",
        }
        options = ServerOptions(
            "fake",
            ports=Ports(0, 0, 0),
            log_file=tmp_path / "server.log",
            stop_timeout=5,
            environment=environment,
        )
        with TritonServer(options) as server, gateway(server.grpc_address, environment) as port:
            assert stream(port) > 1
            wait_for(
                lambda: {span.name for span in sink.of(TRACE)} >= TRITONS | OURS,
                60,
                "every process's spans",
            )
        check(sink.of(TRACE))
        assert sink.encodings == {"application/json", "application/x-protobuf"}


def check(spans: list[Received]) -> None:
    by_name = {span.name: span for span in spans}
    assert {span.service for span in spans} == {
        "pocketllm-gateway", "pocketllm-generator", "pocketllm-detokenizer", SERVICE_NAME,
    }  # fmt: skip
    outer = by_name[SPAN_GATEWAY]
    assert outer.parent == PARENT
    for name, parent in (
        ("InferRequest", SPAN_GATEWAY),
        ("pocketllm", "InferRequest"),
        ("tokenizer", "pocketllm"),
        ("generator", "pocketllm"),
        ("detokenizer", "pocketllm"),
        (names.SPAN_REQUEST, SPAN_GATEWAY),
        (names.SPAN_DETOKENIZE, SPAN_GATEWAY),
        (names.SPAN_QUEUE, names.SPAN_REQUEST),
        (names.SPAN_PREFILL, names.SPAN_REQUEST),
        (names.SPAN_DECODE, names.SPAN_REQUEST),
    ):
        assert by_name[name].parent == by_name[parent].span, name
    # One clock (a host's): the gateway's span holds all others but their last bookkeeping.
    for span in spans:
        assert span.begin >= outer.begin, span.name
        assert span.end >= span.begin, span.name
    request = by_name[names.SPAN_REQUEST]
    assert int(request.attributes["gen_ai.usage.output_tokens"]) == 6
    assert by_name["tokenizer"].begin < request.begin
