"""`pocketllm serve` as a child process, for tests of what it does about trouble."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pocket_backend.triton.liveness import find_processes

ROOT = Path(__file__).resolve().parents[2]
FREE = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


class Served:
    """`pocketllm serve MODEL ARGS` that answers; the lines that it prints are collected.

    ``delay``: seconds of a step of the fake model. ``environment`` goes on top of this process's.
    """

    def __init__(
        self,
        *argv: str,
        model: str = "fake",
        delay: float = 0.01,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pocket_backend.cli.main", "serve", model, *FREE, *argv],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "POCKETLLM_FAKE_OPTIONS": f'{{"delay_seconds": {delay}}}',
                **(environment or {}),
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        try:
            self.wait_for_line("serving; Ctrl-C stops", 90)
        except AssertionError:
            self.__exit__()
            raise
        match = re.search(r"HTTP (\S+), gRPC (\S+),", self.text)
        assert match
        self.http_url, self.grpc_address = match.groups()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._reader.join(30)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for_line(self, part: str, timeout: float = 30, count: int = 1) -> None:
        deadline = time.monotonic() + timeout
        while self.text.count(part) < count:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            assert not ended, f"ended without {part!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {part!r} within {timeout} s:\n{self.text}"
            time.sleep(0.02)

    def server_id(self) -> str:
        """Of the server that serves now."""
        (guardian,) = _children(self.process.pid)
        (server,) = _children(guardian)
        match = re.search(rb"pocketllm-(\w{12})-", Path(f"/proc/{server}/cmdline").read_bytes())
        assert match
        return match[1].decode()

    def pids(self) -> dict[str, int]:
        return find_processes(self.server_id())

    def seconds_restored(self) -> float:
        """From the last detection to service, as the log says."""
        return float(re.findall(r"service restored seconds=([\d.]+)", self.text)[-1])

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))


def _children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in text.split()]


def slowness() -> float:
    """How much later than alone a process gets its turn, from the load of this machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)) * 2
