"""A short chaos run with a fixed seed, as `python -m tests.chaos` does it for minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_half_a_minute_of_chaos() -> None:
    """Strikes go on for half a minute; the last one may begin just before its end."""
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "0.5", "--seed", "3"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# Chaos: PASSED" in done.stdout
    assert "every request is accounted for | passed" in done.stdout
