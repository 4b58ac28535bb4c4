"""Two replicas behind the gateway on a real engine: one dies under load and comes back."""

from __future__ import annotations

import http.client
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from compose_project import WAIT, ComposeProject, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]
PROFILES = ("demo", "scale")
USERS = 6
LONG = "Read this first: " + "the river is wide and the stones are round. " * 20


@pytest.fixture(scope="module")
def replicas(project: ComposeProject) -> ComposeProject:
    project.settings.update(POCKETLLM_CPUS="1", POCKETLLM_MEMORY="1500m")
    services = ("triton", "triton-2", "gateway")
    project.compose("up", "--detach", "--wait", "--no-build", *services, profiles=PROFILES)
    wait_for("two healthy servers", lambda: healthy(project) == 2)
    return project


def healthy(project: ComposeProject) -> int:
    """Servers that the gateway takes for healthy."""
    with urllib.request.urlopen(f"{project.gateway}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        line.startswith("pocketllm_gateway_upstream_healthy{") and line.endswith(" 1.0")
        for line in lines
    )


@dataclass
class Stream:
    """How one streamed chat went."""

    began: bool = False
    end: str = "broke off"
    """``done``, ``error event``, or what else happened."""


class Load:
    """Users who chat one stream after the other until told to leave."""

    def __init__(self, project: ComposeProject) -> None:
        self._project = project
        self.streams: list[Stream] = []
        self.leaving = threading.Event()
        self._lock = threading.Lock()

    def user(self, number: int) -> None:
        while not self.leaving.is_set():
            stream = Stream()
            with self._lock:
                self.streams.append(stream)
            text = f"Conversation {number}. {LONG}"
            try:
                for event in self._project.chat_events(text, max_tokens=24):
                    if event is None:
                        stream.end = "done"
                    elif "error" in event:
                        stream.end = "error event"
                    else:
                        stream.began = True
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                stream.end = repr(error)

    def done(self) -> int:
        with self._lock:
            return sum(stream.end == "done" for stream in self.streams)


def test_killing_a_replica_fails_nothing_that_had_not_begun(
    replicas: ComposeProject, client: Any
) -> None:
    load = Load(replicas)
    with ThreadPoolExecutor(USERS) as pool:
        users = [pool.submit(load.user, number) for number in range(USERS)]
        try:
            wait_for("a warm load", lambda: load.done() >= 2 * USERS)
            replicas.container("triton-2", client).kill()
            before = load.done()
            wait_for("answers of the survivor", lambda: load.done() >= before + 2 * USERS)
        finally:
            load.leaving.set()
        for user in users:
            user.result(WAIT)
    bad = [stream for stream in load.streams if stream.end != "done"]
    assert [stream for stream in bad if not stream.began] == []
    assert {stream.end for stream in bad} <= {"error event"}
    assert len(bad) <= USERS, "only what was streaming when it died may fail"


def test_affinity_forms_again(replicas: ComposeProject) -> None:
    """Killed by hand, the replica is started by hand; then each conversation is cached again."""
    replicas.compose("up", "--detach", "--wait", "--no-build", "triton-2", profiles=PROFILES)
    wait_for("two healthy servers", lambda: healthy(replicas) == 2)
    ratios = []
    for number in range(USERS):
        text = f"Conversation {number}. {LONG}"
        for turn in range(3):
            usage = replicas.chat(f"{text} {turn}", max_tokens=1)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            if turn:
                ratios.append(cached / usage["prompt_tokens"])
    assert min(ratios) > 0.7, ratios
