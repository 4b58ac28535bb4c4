"""Gateway processes for benchmarks, and CPU seconds of processes. Linux, /proc."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_START_SECONDS = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where it listens, and its process."""

    port: int
    pid: int


@contextmanager
def running_gateway(upstream: str, *arguments: str) -> Iterator[Gateway]:
    """A gateway process in front of ``upstream``; raises RuntimeError if it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pocket_client.gateway", "--upstream", upstream]
    command += ["--port", str(port), "--log-level", "warning", *arguments]
    process = subprocess.Popen(command, env=python_environment())
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the gateway did not start")
            time.sleep(0.1)
        yield Gateway(port, process.pid)
    finally:
        process.terminate()
        process.wait(60)


def python_environment() -> dict[str, str]:
    """This one, with the checkout's packages in Python's path."""
    paths = (str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def cpu_seconds(pids: Iterable[int]) -> float:
    """Of these processes, without their children, since they started."""
    ticks = 0
    for pid in pids:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS
