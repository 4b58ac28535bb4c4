"""An engine in a process of its own: the benchmark's side of the worker protocol."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from perf.engines.base import BatchResult, EngineFailure, EngineOptions, Prompts, check_result
from perf.engines.worker import decode_result

_ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_SECONDS = 600.0
"""vLLM compiles kernels at its first start."""
RUN_TIMEOUT_SECONDS = 300.0
CLOSE_TIMEOUT_SECONDS = 10.0


class SubprocessEngine:
    """Runs ``python -m module`` as a worker; see ``Engine`` for the contract.

    The worker leads a process group of its own.  ``pause`` stops that whole group and ``resume``
    lets it go on, so that threads that spin or poll between batches cost the other engines nothing.
    Owns the process: ``close`` ends the group, by force after a grace period.
    """

    def __init__(
        self,
        name: str,
        python: str,
        module: str,
        *,
        log: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._command = [python, "-m", module, *arguments]
        self._environment = {**_clean_environment(), **(environment or {})}
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._paused = False

    @property
    def pid(self) -> int:
        """Of the worker, whose tree is the measured work."""
        if self._process is None:
            raise EngineFailure(f"{self.name}: not started")
        return self._process.pid

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        """Start the process and load the model.

        Raises:
            EngineFailure: started already, or the worker could not start (it has ended then).
        """
        if self._process is not None:
            raise EngineFailure(f"{self.name}: started already")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=_ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        message = {"op": "start", "options": {**asdict(options), "extra": dict(options.extra)}}
        try:
            info = self._call(message, START_TIMEOUT_SECONDS)["info"]
        except EngineFailure:
            self.close()
            raise
        assert isinstance(info, dict)
        return info

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        message = {
            "op": "run",
            "prompts": [list(map(int, prompt)) for prompt in prompts],
            "max_new_tokens": max_new_tokens,
        }
        result = decode_result(self._call(message, RUN_TIMEOUT_SECONDS))
        return check_result(self.name, result, len(prompts), max_new_tokens)

    def memory(self) -> int:
        """Resident bytes of the worker process."""
        value = self._call({"op": "memory"}, 10.0)["resident_bytes"]
        assert isinstance(value, int)
        return value

    def pause(self) -> None:
        """Stop the group until ``resume``."""
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self._paused = False

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
        assert process.stdin is not None
        with suppress(OSError, ValueError):
            process.stdin.write(json.dumps({"op": "close"}) + "\n")
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=CLOSE_TIMEOUT_SECONDS)
        # Helpers that the engine started may outlive it; the group is ours alone.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def _call(self, message: Mapping[str, object], timeout: float) -> dict[str, object]:
        process = self._process
        if process is None:
            raise EngineFailure(f"{self.name}: not started")
        if self._paused:
            self.resume()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        except OSError as error:
            raise EngineFailure(f"{self.name}: the worker ended; {self._log_tail()}") from error
        answer = json.loads(self._read_line(process, timeout))
        if not answer.get("ok"):
            raise EngineFailure(f"{self.name}: {answer.get('error', 'failed')}; see {self._log}")
        return answer

    def _read_line(self, process: subprocess.Popen[str], timeout: float) -> str:
        """One answer; only ever one line is outstanding, so nothing stays in a buffer unseen."""
        assert process.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise EngineFailure(f"{self.name}: no answer within {timeout:.0f} seconds")
        line = process.stdout.readline()
        if not line:
            raise EngineFailure(f"{self.name}: the worker ended; {self._log_tail()}")
        return line

    def _log_tail(self) -> str:
        if not self._log.exists():
            return "no log"
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "its last words: " + " | ".join(lines[-3:])


def _clean_environment() -> dict[str, str]:
    """This process's environment without what would tie a peer to our settings.

    OPENBLAS_CORETYPE and thread counts of the caller would slow a peer down; PYTHONPATH would let
    our packages shadow the peer's.
    """
    drop = ("OPENBLAS_", "OMP_", "MKL_", "PYTHONPATH", "VIRTUAL_ENV", "POCKETLLM_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    return {**kept, "PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
