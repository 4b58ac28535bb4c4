"""Two replicas behind the gateway on a real engine: one dies under load and comes back."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from chat_load import ChatLoad, Stream, conversation, hit_rate, longest_wait
from compose_project import ROOT, WAIT, ComposeProject, free_port, wait_for

from pocket_client import Client, RetryPolicy, UnavailableError

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]
PROFILES = ("demo", "scale")
USERS = 6
CONVERSATIONS = 4
"""Of each user."""
CACHED = 0.7
"""Share of a conversation's prompt that is cached where affinity holds: all but the template's end
and what does not fill a block."""


@pytest.fixture(scope="module")
def replicas(project: ComposeProject) -> ComposeProject:
    project.settings.update(POCKETLLM_CPUS="1", POCKETLLM_MEMORY="1500m")
    services = ("triton", "triton-2", "gateway")
    project.compose("up", "--detach", "--wait", "--no-build", *services, profiles=PROFILES)
    wait_for("two healthy servers", lambda: healthy(project) == 2)
    return project


def metric(project: ComposeProject, name: str, labels: str = "") -> dict[str, float]:
    """Values of the gateway's samples with that name, by server."""
    with urllib.request.urlopen(f"{project.gateway}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    return {
        re.findall(r'upstream="([^"]*)"', found)[0]: float(value)
        for found, value in samples
        if labels in found
    }


def healthy(project: ComposeProject) -> int:
    """Servers that the gateway takes for healthy."""
    return sum(metric(project, "pocketllm_gateway_upstream_healthy").values())


def answered(project: ComposeProject) -> dict[str, float]:
    """Requests that each server has answered."""
    return metric(project, "pocketllm_gateway_upstream_requests_total", 'outcome="answered"')


def by_turn(streams: list[Stream]) -> tuple[list[Stream], list[Stream]]:
    """Of the complete ones: every conversation's first, and the later ones."""
    first, later = [], []
    seen: set[int] = set()
    for stream in streams:
        if stream.end == "done":
            (later if stream.conversation in seen else first).append(stream)
            seen.add(stream.conversation)
    return first, later


def test_killing_a_replica_fails_nothing_that_had_not_begun(
    replicas: ComposeProject, client: Any
) -> None:
    with ChatLoad(replicas, USERS, CONVERSATIONS) as load:
        wait_for("a warm load", lambda: load.all_done(3))
        shares = answered(replicas)
        replicas.container("triton-2", client).kill()
        killed = time.monotonic()
        wait_for("answers of the survivor", lambda: load.all_done(3, since=killed))
    bad = [stream for stream in load.streams if stream.end != "done"]
    _, warm = by_turn([stream for stream in load.streams if stream.sent < killed])
    moved, again = by_turn([stream for stream in load.streams if stream.sent >= killed])
    print(
        f"{len(load.streams)} streams in {USERS * CONVERSATIONS} conversations; answered by each "
        f"before the kill: {sorted(shares.values())}; {len(bad)} ended with an error event, "
        f"{sum(stream.first is None for stream in bad)} failed before they began. Cached share of "
        f"prompts: {hit_rate(warm):.3f} before the kill, {hit_rate(moved):.3f} in each "
        f"conversation's first stream after it, {hit_rate(again):.3f} in the later ones. Longest "
        f"wait for a first event: {longest_wait(warm):.2f} s before, "
        f"{longest_wait(moved + again):.2f} s after"
    )
    assert len(shares) == 2, "one server had all conversations: nothing was tested"
    assert [stream for stream in bad if stream.first is None] == []
    assert {stream.end for stream in bad} <= {"error event"}
    assert len(bad) <= USERS, "only what was streaming when it died may fail"
    assert hit_rate(warm) > CACHED
    assert hit_rate(again) > CACHED, "the survivor has every conversation cached"


def test_affinity_forms_again(replicas: ComposeProject) -> None:
    """Killed by hand, the replica is started by hand; then each conversation is cached again."""
    replicas.compose("up", "--detach", "--wait", "--no-build", "triton-2", profiles=PROFILES)
    wait_for("two healthy servers", lambda: healthy(replicas) == 2)
    before = answered(replicas)
    ratios = []
    for number in range(USERS):
        for turn in range(3):
            usage = replicas.chat(f"{conversation(number)} {turn}", max_tokens=1)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            if turn:
                ratios.append(cached / usage["prompt_tokens"])
    served = [count for server, count in answered(replicas).items()
              if count > before.get(server, 0.0)]  # fmt: skip
    print(f"cached share of prompts after the first turn: {min(ratios):.3f} to {max(ratios):.3f}")
    assert min(ratios) > CACHED, ratios
    assert len(served) == 2, "the server that came back has its conversations again"


def test_haproxy_without_a_gateway(replicas: ComposeProject, client: Any, tmp_path: Path) -> None:
    """deploy/haproxy.cfg spreads one connection's requests, and goes round a killed server."""
    program = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if program is None:
        pytest.skip("haproxy is not installed (Debian: apt-get install haproxy)")
    hosts = [address_of(replicas.container(name, client)) for name in ("triton", "triton-2")]
    text = (ROOT / "deploy" / "haproxy.cfg").read_text()
    port = free_port()
    for old, new in (
        ("127.0.0.1:8101", f"127.0.0.1:{port}"),
        ("127.0.0.1:8001 port 8000", f"{hosts[0]}:8001 port 8000"),
        ("127.0.0.1:8011 port 8010", f"{hosts[1]}:8001 port 8000"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "haproxy.cfg").write_text(text)
    said = tmp_path / "haproxy.log"
    with said.open("wb") as log:
        balancer = subprocess.Popen([program, "-db", "-f", str(tmp_path / "haproxy.cfg")],
                                    stdout=log, stderr=log)  # fmt: skip
    try:
        once = RetryPolicy(attempts=1)
        with Client(f"127.0.0.1:{port}", timeout=60, retry=once) as triton:
            wait_for("haproxy", lambda: answers(triton))
            before = [successes(host) for host in hosts]
            for number in range(20):
                triton.generate(f"{number} is", max_tokens=2)
            shares = [successes(host) - then for host, then in zip(hosts, before, strict=True)]
            assert sum(shares) >= 20, "health checks of the images may have been counted, too"
            assert min(shares) >= 5, shares
            replicas.container("triton-2", client).kill()
            deadline = time.monotonic() + WAIT
            answered_after = 0
            while answered_after < 20 or "triton-2 is DOWN" not in said.read_text():
                assert time.monotonic() < deadline, said.read_text()
                triton.generate(f"{answered_after} is", max_tokens=2)
                answered_after += 1
    finally:
        balancer.terminate()
        balancer.wait(WAIT)
    print(f"haproxy: {shares} requests by server, then {answered_after} answered after a kill")
    assert "triton-1 is DOWN" not in said.read_text()


def address_of(container: Any) -> str:
    """Of its only network; this machine reaches it, since the bridge is here."""
    (network,) = container.attrs["NetworkSettings"]["Networks"].values()
    return str(network["IPAddress"])


def answers(triton: Client) -> bool:
    try:
        triton.generate("Hello", max_tokens=1)
    except UnavailableError:
        return False
    return True


def successes(host: str) -> int:
    """Requests for the whole model that a server has answered."""
    with urllib.request.urlopen(f"http://{host}:8002/metrics", timeout=10) as answer:
        text = answer.read().decode()
    (count,) = re.findall(
        r'^nv_inference_request_success\{model="pocketllm".*\} (\S+)$', text, re.MULTILINE
    )
    return int(float(count))
