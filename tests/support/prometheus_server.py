"""A real Prometheus over the project's own configuration, on a free port of loopback."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def tool(name: str) -> str:
    """The path of a Prometheus program; skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


class PrometheusServer:
    """Scrapes ``targets`` (address by job name) every second; context manager."""

    def __init__(self, folder: Path, targets: Mapping[str, str]) -> None:
        self._program = tool("prometheus")
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / "prometheus" / "rules" / "*.yml")]
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        self._config = folder / "prometheus.yml"
        self._config.write_text(yaml.safe_dump(config))
        self._folder = folder

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={self._config}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def get(self, path: str, **parameters: str) -> Any:
        """``data`` of an API answer."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> dict[str, float]:
        """An instant query: labels (as JSON, sorted) to value."""
        found = self.get("query", query=expression)
        assert found["resultType"] == "vector"
        return {
            json.dumps(item["metric"], sort_keys=True): float(item["value"][1])
            for item in found["result"]
        }

    def value(self, expression: str) -> float | None:
        """The one value of ``expression``; None: no series."""
        values = list(self.query(expression).values())
        assert len(values) <= 1, values
        return values[0] if values else None

    def wait_until_up(self, jobs: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, (self._folder / "prometheus.log").read_text()[
                -2000:
            ]
            try:
                if self.value("sum(up)") == jobs:
                    return
            except OSError:
                assert self._process.poll() is None, "Prometheus ended"
            time.sleep(0.1)
