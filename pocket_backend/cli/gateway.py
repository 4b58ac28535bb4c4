"""The OpenAI gateway beside a server in the foreground: a child process that is kept alive."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from types import TracebackType
from typing import Self

from pocket_backend.api.errors import ConfigurationError
from pocket_backend.cli.reporter import Report, silent
from pocket_backend.observability.logging import get_logger, log_event
from pocket_backend.triton.ports import resolve_one
from pocket_backend.triton.supervisor import RestartPolicy

PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "tritonclient")
"""What the gateway needs beyond this distribution's own dependencies."""
_START_SECONDS = 60.0
_END_SECONDS = 5.0
"""For the gateway to end when its open answers have ended."""
_RESTARTS = RestartPolicy(max_restarts=2**31)
"""Never given up: the server behind it serves without it, too."""
_log = get_logger("cli.gateway")


class GatewayProcess:
    """``python -m pocket_client.gateway`` in front of ``upstream``, started again when it ends.

    Stateless, so every restart is on the same port and loses only the answers that were open.  Owns
    the process: leaving the context ends it.
    """

    def __init__(self, upstream: str, *, host: str, port: int, report: Report = silent) -> None:
        """``upstream``: Triton's gRPC address. ``port`` 0 picks a free one. ``report`` is called on
        the watching thread.

        Raises:
            ConfigurationError: the port is taken, or the gateway's packages are not installed.
        """
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigurationError(
                f"--gateway-port needs {', '.join(missing)}: pip install 'pocketllm[gateway]'"
            )
        self._host = host
        self.port = resolve_one("gateway", port, host)
        self._upstream = upstream
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="gateway", daemon=True)

    @property
    def url(self) -> str:
        """Where clients on this machine reach it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)  # noqa: S104
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        """Returns when it answers.

        Raises:
            ConfigurationError: it ended instead; what it wrote stands on standard error.
        """
        try:
            self._process = self._spawn()
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop_accepting()
            self._end()
            raise
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_accepting()
        if self._watcher.is_alive():
            self._watcher.join(_END_SECONDS)
        self._end()

    def stop_accepting(self) -> None:
        """New connections are refused from now on; open answers go on. Does not wait."""
        self._ending.set()
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C in the terminal is for the parent, which drains first.
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "pocket_backend.cli.gateway_child"),
                *("--upstream", self._upstream, "--host", self._host, "--port", str(self.port)),
                *("--log-level", "warning"),
            ],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ConfigurationError(
                    f"the gateway ended during start-up (status {process.returncode}); it says why "
                    "above"
                )
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5.0):  # noqa: S310
                    return
            except urllib.error.HTTPError:
                return  # it answers
            except OSError:
                time.sleep(0.05)
        raise ConfigurationError(f"the gateway did not answer within {_START_SECONDS:.0f} s")

    def _watch(self) -> None:
        """Start it again whenever it ends, at once and then ever later, until ``_ending``."""
        restarts = 0
        while True:
            process = self._process
            assert process is not None
            began = time.monotonic()
            status = process.wait()
            if self._ending.is_set():
                return
            assert process.stdin is not None
            process.stdin.close()
            if time.monotonic() - began >= _RESTARTS.stable_seconds:
                restarts = 0
            delay = _RESTARTS.delay(restarts) or 0.0
            restarts += 1
            log_event(_log, logging.ERROR, "gateway ended", status=status, restart_in_seconds=delay)
            self._report("gateway_ended", status=status, restart_in_seconds=delay)
            if self._ending.wait(delay):
                return
            self._process = self._spawn()
            if self._ending.is_set():  # asked to end between the two: nobody else closes this one
                self.stop_accepting()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        if process.poll() is None:
            process.kill()
        process.wait()
