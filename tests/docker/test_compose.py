"""compose.yaml on a real engine: it answers, is hardened, survives what is killed, and drains."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import pytest
from compose_project import ComposeProject, wait_for

from pocket_client import (
    AsyncClient,
    Client,
    OverloadedError,
    PocketClientError,
    RetryPolicy,
    UnavailableError,
)

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]
SERVICES = ("triton", "gateway", "prometheus")
_FIND = """
import os, sys
for pid in os.listdir('/proc'):
    if pid.isdigit() and int(pid) != os.getpid():
        words = open(f'/proc/{pid}/cmdline', 'rb').read().split(b'\\0')
        if all(any(part in word for word in words) for part in sys.argv[2:][0].encode().split()):
            print(pid, flush=True)
            os.kill(int(pid), int(sys.argv[1]))
"""
"""Sends a signal to each other process whose command line has all the words."""


@pytest.fixture(scope="module")
def running(project: ComposeProject) -> ComposeProject:
    project.compose("up", "--detach", "--wait", "--no-build", *SERVICES)
    return project


def execute(container: Any, *command: str, user: str = "") -> tuple[int, str]:
    done = container.exec_run(list(command), user=user)
    return done.exit_code, done.output.decode()


def kill_inside(container: Any, words: str, *, ends_all: bool = False) -> None:
    """``ends_all``: the container ends with that process, and what kills it, too."""
    status, output = execute(container, "python3", "-c", _FIND, "9", words)
    assert status in ((0, 137) if ends_all else (0,)), output
    assert output.split(), f"no process has {words!r}"


def test_the_gateway_answers(running: ComposeProject) -> None:
    question = [{"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": "What is the capital of France?"}]  # fmt: skip
    answer = running.chat("", messages=question, max_tokens=24)
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_triton_streams(running: ComposeProject) -> None:
    with Client(running.grpc, timeout=60) as client:
        chunks = list(client.stream("The capital of France is", max_tokens=12))
    assert len(chunks) > 1
    with Client(running.http, timeout=60) as client:
        same = list(client.stream("The capital of France is", max_tokens=12))
    assert "".join(c.text for c in chunks) == "".join(c.text for c in same)


def test_prometheus_scrapes_both(running: ComposeProject) -> None:
    def jobs() -> set[str] | None:
        with urllib.request.urlopen(f"{running.prometheus}/api/v1/targets", timeout=5) as answer:
            targets = json.load(answer)["data"]["activeTargets"]
        up = {target["labels"]["job"] for target in targets if target["health"] == "up"}
        return up if len(up) == 2 else None

    assert wait_for("targets", jobs) == {"pocketllm", "pocketllm-gateway"}


@pytest.mark.parametrize("service", SERVICES)
def test_containers_are_hardened(running: ComposeProject, client: Any, service: str) -> None:
    container = running.container(service, client)
    limits = container.attrs["HostConfig"]
    assert limits["ReadonlyRootfs"]
    assert limits["CapDrop"] == ["ALL"]
    assert limits["Init"]
    assert limits["Memory"] > 0
    assert limits["NanoCpus"] > 0
    for bindings in container.attrs["NetworkSettings"]["Ports"].values():
        assert all(binding["HostIp"] == "127.0.0.1" for binding in bindings or ())
    status, _ = execute(container, "sh", "-c", "touch /etc/x /usr/x /opt/x 2>/dev/null")
    assert status != 0
    assert execute(container, "sh", "-c", "touch /tmp/x && rm /tmp/x")[0] == 0
    status, facts = execute(container, "cat", "/proc/1/status")
    assert status == 0
    fields = dict(line.split(":\t", 1) for line in facts.splitlines() if ":\t" in line)
    assert "0" not in fields["Uid"].split()
    assert fields["NoNewPrivs"] == "1"
    assert int(fields["CapEff"], 16) == 0


@pytest.mark.parametrize("service", ["triton", "gateway"])
def test_images_have_no_tools_and_no_caches(
    running: ComposeProject, client: Any, service: str
) -> None:
    container = running.container(service, client)
    for tool in ("g++", "cc", "cmake", "ninja", "ccache", "pip", "git"):
        assert execute(container, "sh", "-c", f"command -v {tool}")[0] != 0, tool
    _, left = execute(
        container, "find", "/root/.cache", "/var/lib/apt/lists", "/wheels", "/build", "-type", "f",
        user="0",
    )  # fmt: skip
    assert not [line for line in left.splitlines() if not line.startswith("find:")]
    config = container.image.attrs["Config"]
    assert config["User"] == "1000:1000"
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config["Labels"]["org.opencontainers.image.version"] == "test"


def test_a_server_needs_no_network(running: ComposeProject, client: Any) -> None:
    """Offline with a mounted model directory; the image's own health check turns good."""
    container = client.containers.run(
        "pocketllm:test", detach=True, network_mode="none", read_only=True, init=True,
        tmpfs={"/tmp": ""}, shm_size="256m", cap_drop=["ALL"],
        environment={"POCKETLLM_MODEL": "/models", "POCKETLLM_KV_CACHE_TOKENS": "4096"},
        volumes={f"{running.name}_models": {"bind": "/models", "mode": "ro"}},
        healthcheck={"test": ["CMD", "pocketllm", "probe", "--deep"], "interval": 10**9,
                     "start_period": 120 * 10**9},
    )  # fmt: skip
    try:
        wait_for("health", lambda: (container.reload(), container.health == "healthy")[1])
    finally:
        container.remove(force=True)


def test_beyond_this_machine_keys_are_required(running: ComposeProject) -> None:
    with pytest.raises(AssertionError, match="would be open to everybody: set API keys"):
        running.compose("run", "--rm", "--no-deps", "gateway", POCKETLLM_BIND="0.0.0.0",
                        POCKETLLM_GATEWAY_PORT="0")  # fmt: skip


@pytest.mark.parametrize("victim", ["triton_python_backend_stub generator", "bin/tritonserver"])
def test_kill_9_inside_is_healed_by_the_supervisor(
    running: ComposeProject, client: Any, victim: str
) -> None:
    container = running.container("triton", client)
    kill_inside(container, victim)
    wait_for("an answer", lambda: running.chat("Hello", max_tokens=4))
    container.reload()
    assert container.attrs["RestartCount"] == 0


def test_kill_9_of_the_supervisor_restarts_the_container(
    running: ComposeProject, client: Any
) -> None:
    container = running.container("triton", client)
    kill_inside(container, "bin/pocketllm serve", ends_all=True)

    def restarted() -> bool:
        container.reload()
        return container.attrs["RestartCount"] == 1 and container.health == "healthy"

    wait_for("a restart", restarted)
    wait_for("an answer", lambda: running.chat("Hello", max_tokens=4))


def test_docker_stop_ends_fifty_streams_properly(running: ComposeProject, client: Any) -> None:
    """Each is finished, or told UNAVAILABLE; none breaks off and none waits for ever."""
    container = running.container("triton", client)
    ends = asyncio.run(_stop_under_streams(running.grpc, lambda: container.stop(timeout=60)))
    assert len(ends) == 50
    assert set(ends) <= {"stop", "length", "told"}, ends
    assert "told" in ends, "all streams were finished before the stop: nothing was tested"
    container.reload()
    assert container.attrs["State"]["ExitCode"] == 0
    assert not container.attrs["State"]["OOMKilled"]
    container.start()
    wait_for("an answer", lambda: running.chat("Hello", max_tokens=4))


async def _stop_under_streams(address: str, stop: Any) -> list[str]:
    started = asyncio.Event()
    # Not repeated: what the server says first counts.
    client = AsyncClient(address, timeout=120, retry=RetryPolicy(attempts=1))

    async def one(number: int) -> str:
        # 10 finish within the drain, the others are in the middle of a long answer or queued.
        tokens = 20 if number < 10 else 1500
        try:
            async with client.stream(
                f"{number} reasons to read:", max_tokens=tokens, ignore_eos=True
            ) as stream:
                async for _ in stream:
                    started.set()
            assert stream.completion.finish_reason is not None
            return stream.completion.finish_reason
        except (OverloadedError, UnavailableError) as error:
            return "told" if error.from_server else f"broke off: {error}"
        except PocketClientError as error:
            return f"{type(error).__name__}: {error}"

    streams = [asyncio.create_task(one(number)) for number in range(50)]
    await asyncio.wait_for(started.wait(), 120)
    await asyncio.to_thread(stop)
    ends = await asyncio.gather(*streams)
    await client.aclose()
    return ends


def test_a_restart_keeps_serving(running: ComposeProject) -> None:
    running.compose("restart", "triton", "gateway")
    wait_for("an answer", lambda: running.chat("Hello", max_tokens=4))


def test_z_down_leaves_nothing(running: ComposeProject, client: Any) -> None:
    """Runs last: what the module started is gone afterwards."""
    running.compose("down", "--volumes")
    label = {"label": f"com.docker.compose.project={running.name}"}
    assert client.containers.list(all=True, filters=label) == []
    assert client.networks.list(filters=label) == []
    assert client.volumes.list(filters=label) == []
