"""A real Prometheus scrapes a real server and a real gateway; it answers what was served."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_server import RunningGateway
from prometheus_server import DEPLOY, PrometheusServer
from triton_clients import generate, wait_for
from triton_metrics import scrape

from pocket_backend.triton.launcher import TritonServer
from pocket_client.gateway.settings import GatewaySettings


@pytest.fixture
def gateway(fake_server: TritonServer) -> Iterator[RunningGateway]:
    with RunningGateway(GatewaySettings(upstream=fake_server.grpc_address)) as running:
        yield running


@pytest.fixture
def prometheus(
    fake_server: TritonServer, gateway: RunningGateway, tmp_path: Path
) -> Iterator[PrometheusServer]:
    targets = {
        "pocketllm": f"127.0.0.1:{fake_server.ports.metrics}",
        "pocketllm-gateway": f"127.0.0.1:{gateway.port}",
    }
    with PrometheusServer(tmp_path, targets) as running:
        running.wait_until_up(2)
        yield running


def complete(gateway: RunningGateway) -> None:
    body = {"model": "pocketllm", "prompt": "abc", "max_tokens": 5, "temperature": 0}
    request = urllib.request.Request(
        f"{gateway.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 5


def test_prometheus_sees_what_was_served(
    fake_server: TritonServer, gateway: RunningGateway, prometheus: PrometheusServer
) -> None:
    generated = 'pocket_tokens_total{type="generated"}'
    for _ in range(3):
        complete(gateway)
    for _ in range(4):
        generate(fake_server.http_url, {"text_input": "abc", "max_tokens": 6, "ignore_eos": True})
    wait_for(
        lambda: prometheus.value("pocketllm_gateway_completion_tokens_total") == 15,
        60,
        "the gateway's tokens",
    )

    def same() -> bool:
        now = scrape(fake_server.metrics_url)
        return (
            prometheus.value(generated) == now[generated]
            and prometheus.value("pocket_ttft_seconds_count") == now["pocket_ttft_seconds_count"]
        )

    wait_for(same, 60, "Prometheus to have the server's last values")
    answered = 'pocketllm_gateway_requests_total{endpoint="/v1/completions", status="200"}'
    wait_for(lambda: prometheus.value(answered) == 3, what="the gateway's requests")

    # Both kinds of histogram answer quantiles, and the recording rules are evaluated.
    for expression in (
        "instance:pocket_ttft_seconds:p50_rate5m",
        "instance:pocket_inter_token_latency_seconds:p99_rate5m",
        "instance:pocket_batch_size:mean_rate5m",
        "job:pocket_slo_inter_token:missed_rate5m",
    ):
        wait_for(lambda e=expression: prometheus.value(e) is not None, 60, expression)
    kinds = prometheus.get("metadata")
    assert kinds["pocket_ttft_seconds"][0]["type"] == "histogram"
    assert kinds["pocket_tokens_total"][0]["type"] == "counter"
    rules = [r for group in prometheus.get("rules")["groups"] for r in group["rules"]]
    assert len(rules) > 20
    assert [rule["name"] for rule in rules if rule["health"] == "err"] == []

    # Every query of every dashboard has an answer (a rate needs two scrapes).
    for path in (DEPLOY / "grafana" / "dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                text = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
                wait_for(lambda query=text: prometheus.query(query) != {}, 60, text)
