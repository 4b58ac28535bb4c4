"""Servers that take part: each started as its own documentation says, in its own environment.

Ours is ``pocketllm serve`` with its gateway: Triton, supervisor and all. A peer is the
OpenAI-compatible server of its own package, in the virtual environment of ``engines.environments``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from perf.bars import OURS
from perf.engines.base import EngineFailure
from perf.engines.environments import CACHE, PEERS, ROOT, ensure_venv, requirements_stamp

START_SECONDS = 600.0
STOP_SECONDS = 30.0
CONTEXT = 2048
SEQUENCES = 16
LEFT_OUT = {
    "openvino": "openvino-genai has no server, and OpenVINO Model Server is not on PyPI",
    "transformers": "`transformers serve` computes one request at a time",
}
"""Peers of perf.compare without a server to compare with, and why."""
SERVED = ("llama.cpp", "vllm")


@dataclass(slots=True)
class Server:
    """One server process (and what it starts). Not thread-safe.

    ``body`` goes into every request: how this server is told to ignore the end of sequence.
    ``pausable``: it is stopped (``SIGSTOP``) outside its turns. Triton is not, since it may take
    a stopped stub for a dead one; it idles.
    """

    name: str
    command: Sequence[str]
    port: int
    body: Mapping[str, object]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    pausable: bool = True
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> Self:
        """Returns once ``/v1/models`` answers.

        Raises:
            EngineFailure: it ended or did not answer in time; the message has its last lines.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                list(self.command),
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                last = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-6:]
                raise EngineFailure(f"{self.name} did not start; {self.log}: {' / '.join(last)}")
            time.sleep(0.2)
        return self

    def pause(self) -> None:
        if self.pausable and self._process is not None:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if self.pausable and self._process is not None:
            os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """May be called twice."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.HTTPError):
            return False


def our_server(model: str, threads: int, fake_options: str | None = None) -> Server:
    """``pocketllm serve`` with its gateway."""
    port = _free_port()
    environment = {
        "POCKETLLM_THREADS": str(threads),
        "POCKETLLM_MAX_BATCH_SIZE": str(SEQUENCES),
        "POCKETLLM_MAX_MODEL_LEN": str(CONTEXT),
        "POCKETLLM_KV_CACHE_TOKENS": str(SEQUENCES * CONTEXT),
    }
    if fake_options is not None:
        environment = {"POCKETLLM_FAKE_OPTIONS": fake_options}
    command = [sys.executable, "-m", "pocket_backend.cli.main", "serve", model]
    command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    command += ["--gateway-port", str(port)]
    body = {"model": "pocketllm", "ignore_eos": True}
    log = CACHE / "pocketllm" / "serve.log"
    return Server(OURS, command, port, body, log, environment, pausable=False)


def peer_server(name: str, gguf: Path, threads: int, eos: int) -> Server:
    """The server of peer ``name``, installed if need be, not started.

    Raises:
        EngineFailure: unknown, has no server (the message says why), or its installation failed.
    """
    if name in LEFT_OUT:
        raise EngineFailure(f"{name} is left out: {LEFT_OUT[name]}")
    if name not in SERVED:
        raise EngineFailure(f"unknown peer {name!r}; known: {', '.join(SERVED)}")
    peer = PEERS[name]
    venv = CACHE / name / "venv"
    python = ensure_venv(name, peer, venv)
    if name == "llama.cpp":
        _add_packages(python, venv, "peers-llama.cpp-server.txt")
    port = _free_port()
    model = peer.weights(gguf)
    command, body = peer_command(name, python, model, port, threads, eos)
    environment = {**peer.environment(venv, threads)}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # for its offline interface
    return Server(name, command, port, body, CACHE / name / "serve.log", environment)


def peer_command(
    name: str, python: str, model: Path, port: int, threads: int, eos: int
) -> tuple[list[str], dict[str, object]]:
    """How the server of ``name`` is started, and what its requests carry besides."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if name == "llama.cpp":
        command = [python, "-m", "llama_cpp.server", "--model", str(model), *where]
        command += ["--model_alias", name, "--n_ctx", str(CONTEXT), "--flash_attn", "true"]
        command += ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
        # By default a new request ends the one that is being answered.
        command += ["--interrupt_requests", "false"]
        # It has no way to ignore the end of sequence but to make it impossible.
        return command, {"model": name, "logit_bias": {str(eos): -100}}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *where]
    command += ["--served-model-name", name, "--max-model-len", str(CONTEXT)]
    command += ["--max-num-seqs", str(SEQUENCES), "--max-num-batched-tokens", "4608"]
    return command, {"model": name, "ignore_eos": True}


def _add_packages(python: str, venv: Path, file: str) -> None:
    """What a server needs beyond the peer's own pins."""
    stamp_file = venv / f".{file}"
    stamp = requirements_stamp(((file, True),), ROOT / "requirements")
    if stamp_file.exists() and stamp_file.read_text(encoding="ascii") == stamp:
        return
    log = venv.parent / "install-server.log"
    with log.open("wb") as out:
        done = subprocess.run(
            [python, "-m", "pip", "install", "-r", str(ROOT / "requirements" / file)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode != 0:
        raise EngineFailure(f"installing {file} failed; see {log}")
    stamp_file.write_text(stamp, encoding="ascii")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
