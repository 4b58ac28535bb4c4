"""``python -m perf.locust``: a server and a gateway, Locust's users against them, a verdict.

Status: Locust's; 0 if all objectives were met, 1 if not. Further options go to Locust
(``--arrivals``, ``--slo-ttft-p95``, ``--slo-itl-p99``, ``--slo-failures``, ``--html``, ...).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pocket_backend.api import ConfigurationError
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports
from pocket_backend.triton.settings import FAKE_MODEL, find_default_model

ROOT = Path(__file__).resolve().parents[2]
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
_START_SECONDS = 30.0
_FAKE_OPTIONS = '{"delay_seconds": 0.01, "max_context": 16384, "num_blocks": 8192}'
"""A token is a byte there, so prompts are long."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="a GGUF file, or `fake`; default: the demo model")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--html", type=Path, default=ROOT / "build" / "locust.html")
    options, passed_on = parser.parse_known_args(arguments)
    if importlib.util.find_spec("locust") is None:
        print("locust is not installed: pip install -r requirements/locust.txt, or `make locust`",
              file=sys.stderr)  # fmt: skip
        return 2
    model = options.model or find_default_model()
    if model is None:
        print("no model; give --model FILE.gguf or --model fake", file=sys.stderr)
        return 2
    environment = {}
    if model == FAKE_MODEL:
        environment["POCKETLLM_FAKE_OPTIONS"] = _FAKE_OPTIONS
    options.html.parent.mkdir(parents=True, exist_ok=True)
    server = TritonServer(ServerOptions(str(model), ports=Ports(0, 0, 0), environment=environment))
    try:
        with server, gateway(server.grpc_address) as address:
            command = [
                sys.executable, "-m", "locust", "-f", str(LOCUSTFILE),
                "--headless", "--only-summary", "--stop-timeout", "60",
                "--users", str(options.users), "--spawn-rate", str(options.users),
                "--run-time", f"{options.seconds}s", "--html", str(options.html),
                "--grpc", server.grpc_address, "--http", server.http_url, "--openai", address,
                *passed_on,
            ]  # fmt: skip
            status = subprocess.run(command, cwd=ROOT, env=_environment(), check=False).returncode
    except ConfigurationError as error:
        print(f"locust: {error}", file=sys.stderr)
        return 2
    print(f"report: {options.html}; verdict: {'passed' if status == 0 else 'FAILED'}")
    return status


@contextmanager
def gateway(upstream: str) -> Iterator[str]:
    """The address of a gateway process in front of ``upstream``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pocket_client.gateway",
            "--upstream",
            upstream,
            "--port",
            str(port),
        ],
        env=_environment(),
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/health", process)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ConfigurationError("the gateway did not start") from None
            time.sleep(0.1)


def _environment() -> dict[str, str]:
    paths = (str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


if __name__ == "__main__":
    raise SystemExit(main())
