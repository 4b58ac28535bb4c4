"""schemathesis against the OpenAPI document: no 5xx, nothing undocumented, bad bodies refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_server import RunningGateway

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)
# Left out: that whatever the schemas allow is accepted. They cannot say that stream_options need a
# stream, that messages must suit the model's template, or that a request id must be running.
EXCLUDED = "positive_data_acceptance"


def fuzz(gateway: RunningGateway, folder: Path, *options: str, seconds: float = 280) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/openapi.json"]
    command += ["--checks", "all", "--exclude-checks", EXCLUDED, "--seed", "8", "--no-color"]
    run = subprocess.run(
        [*command, "--warnings", "off", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Selected: 12/12" in run.stdout, run.stdout


def test_a_few_of_everything(gateway: RunningGateway, tmp_path: Path) -> None:
    fuzz(gateway, tmp_path, "--phases", "fuzzing", "--max-examples", "3", "--no-shrink")


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_many(gateway: RunningGateway, tmp_path: Path) -> None:
    fuzz(gateway, tmp_path, "--max-examples", "30", seconds=1200)
