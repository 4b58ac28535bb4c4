"""Every panel of every dashboard shows numbers while a mixed load runs, by a real Prometheus."""

from __future__ import annotations

import json
import math
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gateway_server import RunningGateway
from prometheus_server import DEPLOY, PrometheusServer
from triton_clients import wait_for

from perf.load.mix import MixedLoad
from pocket_backend.triton.launcher import TritonServer
from pocket_client.gateway.settings import GatewaySettings

INTERVAL = "20s"
"""In place of Grafana's: some scrapes of a second each, also on a busy machine."""
REQUIRED = 45
"""Queries there are at least: fewer means that the dashboards were not found or not read."""


def queries() -> dict[str, str]:
    """PromQL by "dashboard: panel: legend", with Grafana's variables filled in."""
    found = {}
    for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                text = target["expr"].replace("$__rate_interval", INTERVAL)
                name = f"{path.stem}: {panel['title']}: {target['legendFormat']}"
                assert name not in found, "two queries of one name"
                found[name] = text.replace("$instance", ".*")
                assert "$" not in found[name], found[name]
    return found


@contextmanager
def chatting(gateway: RunningGateway) -> Iterator[None]:
    """Completions through the gateway, one after the other, until the end."""
    ended = threading.Event()

    def chat() -> None:
        body = {"model": "pocketllm", "prompt": "abc", "max_tokens": 5}
        while not ended.is_set():
            request = urllib.request.Request(
                f"{gateway.url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 5

    thread = threading.Thread(target=chat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.slow
def test_every_panel_shows_numbers_under_load(fake_server: TritonServer, tmp_path: Path) -> None:
    wanted = queries()
    assert len(wanted) >= REQUIRED
    load = MixedLoad(fake_server.grpc_address, fake_server.http_url, users=6, seed=1)
    with RunningGateway(GatewaySettings(upstream=fake_server.grpc_address)) as gateway:
        targets = {
            "pocketllm": f"127.0.0.1:{fake_server.ports.metrics}",
            "pocketllm-gateway": f"127.0.0.1:{gateway.port}",
        }
        with PrometheusServer(tmp_path, targets) as prometheus, chatting(gateway):
            prometheus.wait_until_up(2)
            load.start()
            try:
                shown: dict[str, list[float]] = {}

                def numbers(name: str, query: str) -> bool:
                    shown[name] = list(prometheus.query(query).values())
                    return bool(shown[name]) and all(map(math.isfinite, shown[name]))

                for name, query in wanted.items():
                    wait_for(lambda n=name, q=query: numbers(n, q), 120, f"{name}\n{query}")
            finally:
                load.stop(timeout=120)
    for name, values in shown.items():
        print(f"{name} = {', '.join(f'{value:.4g}' for value in values)}")
    # What the load certainly does must show as more than zero.
    for panel in (
        "Generated tokens per second: tokens",
        "Time to first token: p99",
        "Time of a step: p50",
        "KV blocks: {{state}}",
    ):
        assert max(shown[f"pocketllm-server: {panel}"]) > 0, panel
    assert shown["pocketllm-gateway: Tokens per second: generated"][0] > 0
