"""compose.yaml as a project of its own: free ports, small limits, images of this checkout."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
WAIT = 120.0
"""Seconds for anything that has to happen; events are waited for, never slept for."""
STAND_INS = {
    "TRITON_BASE": ("local/triton", "triton"),
    "PYTHON_BASE": ("local/python", "python"),
    "PROMETHEUS_IMAGE": ("local/prometheus", "prometheus"),
}
"""Variable of compose.yaml: image that stands in where no registry is reached, and its target."""
_DEBIAN = "local/debian:bookworm"
_PORTS = ("POCKETLLM_HTTP_PORT", "POCKETLLM_GRPC_PORT", "POCKETLLM_METRICS_PORT",
          "POCKETLLM_GATEWAY_PORT", "PROMETHEUS_PORT")  # fmt: skip
_Found = TypeVar("_Found")


def docker(host: str, *arguments: str, **environment: str) -> str:
    """Runs the client in the checkout; returns its output. Raises AssertionError if it fails."""
    done = subprocess.run(
        ["docker", *arguments], cwd=ROOT, env={**os.environ, **environment, "DOCKER_HOST": host},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"docker {' '.join(arguments)}:\n{done.stderr[-3000:]}"
    return done.stdout


def base_images(host: str) -> dict[str, str]:
    """Base images by variable: those that the environment names, else stand-ins, made if absent."""
    chosen = {name: os.environ.get(name, image) for name, (image, _) in STAND_INS.items()}
    missing = [
        (image, target)
        for name, (image, target) in STAND_INS.items()
        if chosen[name] == image and not docker(host, "images", "--quiet", image)
    ]
    if missing and not docker(host, "images", "--quiet", _DEBIAN):
        script = ROOT / "docker" / "stand-ins" / "debian.sh"
        environment = {**os.environ, "DOCKER_HOST": host}
        subprocess.run([str(script), "bookworm", _DEBIAN], cwd=ROOT, env=environment, check=True)
    for image, target in missing:
        docker(
            host, "build", "--network", "host", "--build-arg", f"DEBIAN_IMAGE={_DEBIAN}",
            "--target", target, "--tag", image, "-f", "docker/stand-ins/Dockerfile",
            "docker/stand-ins",
        )  # fmt: skip
    return chosen


class ComposeProject:
    """One ``docker compose`` project; ``down`` removes all of it."""

    def __init__(self, host: str, name: str, settings: Mapping[str, str]) -> None:
        self.host = host
        self.name = name
        self.settings = {
            "POCKETLLM_TAG": "test", "POCKETLLM_BUILD_NETWORK": "host",
            "POCKETLLM_CPUS": "2", "POCKETLLM_MEMORY": "2g", "POCKETLLM_SHM_SIZE": "256m",
            "POCKETLLM_KV_CACHE_TOKENS": "16384", "POCKETLLM_STOP_SECONDS": "4",
            **{name: str(free_port()) for name in _PORTS}, **settings,
        }  # fmt: skip

    @property
    def gateway(self) -> str:
        return f"http://127.0.0.1:{self.settings['POCKETLLM_GATEWAY_PORT']}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.settings['POCKETLLM_HTTP_PORT']}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.settings['POCKETLLM_GRPC_PORT']}"

    @property
    def prometheus(self) -> str:
        return f"http://127.0.0.1:{self.settings['PROMETHEUS_PORT']}"

    def compose(self, *arguments: str, profiles: Sequence[str] = ("demo",), **extra: str) -> str:
        """``docker compose``; no ``.env`` of the checkout is read."""
        options = [option for profile in profiles for option in ("--profile", profile)]
        return docker(
            self.host, "compose", "--env-file", "/dev/null", "--project-name", self.name, *options,
            *arguments, **{**self.settings, **extra},
        )  # fmt: skip

    def container(self, service: str, client: Any) -> Any:
        """The SDK's object of a service's only container."""
        (found,) = client.containers.list(all=True, filters={"label": self._labels(service)})
        return found

    def _labels(self, service: str) -> list[str]:
        prefix = "com.docker.compose"
        return [f"{prefix}.project={self.name}", f"{prefix}.service={service}"]

    def chat(self, text: str, **fields: object) -> dict[str, Any]:
        """One answer of the gateway. Raises OSError if there is none."""
        body = {"model": "pocketllm", "messages": [{"role": "user", "content": text}],
                "temperature": 0, "max_tokens": 8, **fields}  # fmt: skip
        request = urllib.request.Request(
            f"{self.gateway}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def chat_events(self, text: str, **fields: object) -> Iterator[dict[str, Any] | None]:
        """Events of a streamed answer; None is ``[DONE]``. Raises RuntimeError for a bad status."""
        body = {"model": "pocketllm", "messages": [{"role": "user", "content": text}],
                "temperature": 0, "stream": True, **fields}  # fmt: skip
        address = self.gateway.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=WAIT)
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read(500)!r}")
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data:
                    yield None if data == b"[DONE]" else json.loads(data)
        finally:
            connection.close()


def wait_for(what: str, found: Callable[[], _Found | None], seconds: float = WAIT) -> _Found:
    """The first true value of ``found``; an OSError of its counts as none yet."""
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = found()
        except (OSError, http.client.HTTPException) as error:
            last = error
        else:
            if last:
                return last  # type: ignore[return-value]
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {seconds:g} s; last: {last}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
