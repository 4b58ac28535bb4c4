"""`pocketllm serve --gateway-port`: one command serves Triton's protocols and OpenAI's."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import Served, slowness
from triton_clients import control, post, wait_for

from pocket_backend.cli.gateway import GatewayProcess

LONG: dict[str, object] = {"model": "pocketllm", "prompt": "p", "max_tokens": 4000}
"""Forty seconds or more: longer than any drain here."""


@pytest.fixture
def served() -> Iterator[Served]:
    # What a second's answer may take when others use the machine, too.
    drain = min(1.5 * slowness(), 20)
    with Served("--gateway-port", "0", "--drain-seconds", f"{drain:.1f}") as running:
        yield running


def gateway_url(served: Served) -> str:
    match = re.search(r"OpenAI API at (http://127\.0\.0\.1:\d+)/v1", served.text)
    assert match, served.text
    return match[1]


def gateway_pid(served: Served) -> int:
    """0 while there is none. Each thread of the parent has children of its own."""
    for thread in Path(f"/proc/{served.process.pid}/task").iterdir():
        for pid in (thread / "children").read_text().split():
            if b"gateway_child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return 0


def complete(url: str, **fields: object) -> dict[str, object]:
    body = {"model": "pocketllm", "prompt": "abc", "max_tokens": 5, **fields}
    status, data = post(f"{url}/v1/completions", body)
    assert status == 200, data
    answer: dict[str, object] = json.loads(data)
    return answer


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_gateway_answers_is_restarted_and_drains(served: Served) -> None:
    """A killed gateway comes back on the same port; SIGTERM ends open answers, then all of it."""
    url = gateway_url(served)
    usage = complete(url)["usage"]
    assert isinstance(usage, dict)
    assert usage["completion_tokens"] == 5
    killed = gateway_pid(served)
    os.kill(killed, signal.SIGKILL)
    served.wait_for_line("gateway ended")
    wait_for(lambda: gateway_pid(served) not in (0, killed) and answers(url), 60, "another one")
    assert complete(url)["object"] == "text_completion"
    with ThreadPoolExecutor(2) as pool:
        short = pool.submit(complete, url, max_tokens=100, temperature=0)
        long = pool.submit(post, f"{url}/v1/completions", LONG)
        wait_for(lambda: control(served.http_url, {"stats": True})["running"] == 2, 30, "both run")
        served.process.send_signal(signal.SIGTERM)
        assert short.result(60)["object"] == "text_completion"
        status, data = long.result(60)
        assert status == 503, data
        assert served.process.wait(60) == 0
    assert not Path(f"/proc/{killed}").exists()
    assert not answers(url)


def test_each_end_of_a_gateway_is_an_event() -> None:
    """`serve --json` prints them: the first restart is at once, the next one a second later."""
    reported: list[tuple[str, dict[str, object]]] = []
    no_server = "127.0.0.1:1"
    with GatewayProcess(
        no_server, host="127.0.0.1", port=0, report=lambda name, **f: reported.append((name, f))
    ) as gateway:
        for restart_in in (0.0, 1.0):
            killed, count = gateway.pid, len(reported)
            os.kill(killed, signal.SIGKILL)
            wait_for(lambda n=count: len(reported) > n, 60, "reported")
            expected = {"status": -signal.SIGKILL, "restart_in_seconds": restart_in}
            assert reported[-1] == ("gateway_ended", expected)
            wait_for(lambda k=killed: gateway.pid != k and answers(gateway.url), 60, "another one")
    assert len(reported) == 2
    assert not answers(gateway.url)


def test_gateway_ends_with_a_killed_parent(served: Served) -> None:
    url = gateway_url(served)
    assert answers(url)
    served.process.kill()
    wait_for(lambda: not answers(url), 60, "the gateway is gone")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gateway-port", "99999"), "error: --gateway-port: got 99999; must be from 0 to 65535"),
        (("--gateway-port", "0", "--host", "0.0.0.0"), "error: the gateway ended during start-up"),
    ],
)
def test_gateways_that_cannot_start(arguments: tuple[str, ...], message: str) -> None:
    """The second would be open to everybody: it asks for API keys, and the command ends."""
    served = Served(*arguments)
    try:
        with pytest.raises(AssertionError, match="ended without"):
            served.__enter__()
        assert served.process.wait(60) == 1
        assert message in served.text
    finally:
        served.__exit__()
