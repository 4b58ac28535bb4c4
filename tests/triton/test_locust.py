"""The Locust tests against a real server and gateway: statistics, verdict, report."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("locust") is None,  # not imported here: it would patch this process
    reason="pip install -r requirements/locust.txt",
)
@pytest.mark.parametrize(
    ("objective", "status"), [("1000", 0), ("0.000001", 1)], ids=["met", "missed"]
)
def test_users_and_verdict(tmp_path: Path, objective: str, status: int) -> None:
    html = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "perf.locust", "--model", "fake", "--users", "6", "--seconds", "8",
         "--html", str(html), "--slo-ttft-p95", objective, "--slo-itl-p99", "1000"],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == status, output[-4000:]
    assert html.stat().st_size > 10_000
    for line in ("TTFT     all streams", "ITL      all streams", "grpc answer", "http answer",
                 "openai chat"):  # fmt: skip
        assert line in output, line
