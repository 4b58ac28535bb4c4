"""`pocketllm serve` heals its server, and a stop drains it: from outside, against the command."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from served import Served, slowness
from triton_clients import (
    Reply,
    control,
    generate,
    generate_stream,
    grpc_stream,
    processes_mentioning,
    wait_for,
)

from pocket_backend.triton.liveness import SERVER
from pocket_backend.triton.shm import SHM_DIR

LONG: dict[str, object] = {"text_input": "p", "max_tokens": 4000, "ignore_eos": True}
"""Forty seconds at 10 ms a token."""
STUBS = ("tokenizer", "generator", "detokenizer")


def outcome(served: Served, way: str, body: dict[str, object]) -> Reply | Exception:
    """How one request ended, the connection included."""
    try:
        match way:
            case "grpc":
                return grpc_stream(served.grpc_address, body)
            case "http":
                return generate_stream(served.http_url, body)
            case _:
                return generate(served.http_url, body)
    except Exception as error:  # noqa: BLE001  (a closed connection has many names)
        return error


def stats(served: Served) -> dict[str, object]:
    return control(served.http_url, {"stats": True})


def failed(result: Reply | Exception) -> bool:
    return isinstance(result, Exception) or result.error is not None


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--stable-seconds", "0") as running:
        yield running


def default_and_slow(default: str) -> list[object]:
    """All processes; only ``default`` in every run, the others take half a minute."""
    return [
        victim if victim == default else pytest.param(victim, marks=pytest.mark.slow)
        for victim in (*STUBS, SERVER)
    ]


@pytest.mark.parametrize("victim", default_and_slow("generator"))
def test_t5_killed_process(served: Served, victim: str) -> None:
    """Noticed within 5 s, open requests end, service is back within 10 s."""
    heal(served, victim, signal.SIGKILL)


@pytest.mark.parametrize("victim", default_and_slow("detokenizer"))
def test_stopped_process(served: Served, victim: str) -> None:
    """The same for one that stands still; Triton itself may abort meanwhile (fact 8)."""
    heal(served, victim, signal.SIGSTOP)


def heal(served: Served, victim: str, number: signal.Signals) -> None:
    before = served.server_id()
    restored, unhealthy = (
        served.text.count(line) for line in ("service restored", "server unhealthy")
    )
    with ThreadPoolExecutor(4) as pool:
        futures: list[Future[Reply | Exception]] = [
            pool.submit(outcome, served, way, LONG) for way in ("grpc", "http", "once", "grpc")
        ]
        wait_for(lambda: stats(served)["running"] == 4, 30, "all four run")
        os.kill(served.pids()[victim], number)
        struck = time.monotonic()
        served.wait_for_line("server unhealthy", 30, unhealthy + 1)
        noticed = time.monotonic() - struck
        results = [future.result(40) for future in futures]
    served.wait_for_line("service restored", 60, restored + 1)
    assert noticed < 5 * slowness()
    assert served.seconds_restored() < 10 * slowness()
    assert all(map(failed, results)), results
    reply = generate(served.http_url, {"text_input": "p", "max_tokens": 3})
    assert reply.error is None
    assert served.server_id() != before
    wait_for(lambda: not processes_mentioning(before), 20, "the old server is gone")
    assert not list(SHM_DIR.glob(f"*{before}*"))


def ready(served: Served) -> int:
    try:
        with urllib.request.urlopen(f"{served.http_url}/v2/health/ready", timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_sigterm_drains() -> None:
    """Readiness turns false, newcomers are sent away, the short request ends, the long one gets an
    error event, and the exit status is 0."""
    with Served("--drain-seconds", "6") as served, ThreadPoolExecutor(4) as pool:
        short = pool.submit(outcome, served, "grpc", {**LONG, "max_tokens": 60})
        long = [pool.submit(outcome, served, way, LONG) for way in ("grpc", "http", "once")]
        wait_for(lambda: stats(served)["running"] == 4, 30, "all four run")
        assert ready(served) == 200
        served.process.send_signal(signal.SIGTERM)
        served.wait_for_line("draining open_requests=4")
        assert ready(served) == 400
        for way in ("grpc", "http", "once"):
            refused = outcome(served, way, {"text_input": "new", "max_tokens": 1})
            assert isinstance(refused, Reply)
            assert "shutting down" in str(refused.error)
        reply = short.result(30)
        assert isinstance(reply, Reply)
        assert (reply.error, reply.num_output_tokens) == (None, 60)
        for future in long:
            ended = future.result(30)
            assert isinstance(ended, Reply), ended
            assert "shutting down" in str(ended.error)
        assert served.process.wait(30) == 0
        assert "drained ended_with_error=3" in served.text


@pytest.mark.parametrize(
    "second", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT]
)
def test_second_signal_hastens_the_drain(second: signal.Signals) -> None:
    with Served("--drain-seconds", "600") as served, ThreadPoolExecutor(1) as pool:
        long = pool.submit(outcome, served, "grpc", LONG)
        wait_for(lambda: stats(served)["running"] == 1, 30, "it runs")
        served.process.send_signal(signal.SIGTERM)
        served.wait_for_line("draining open_requests=1")
        served.process.send_signal(second)
        ended = long.result(30)
        assert isinstance(ended, Reply), ended
        assert "shutting down" in str(ended.error)
        assert served.process.wait(30) == 0


@pytest.mark.slow
def test_crash_loop_gives_up() -> None:
    """Every restart is followed by a crash: the delays grow, and then it ends with a failure."""
    with Served("--max-restarts", "2") as served:
        os.kill(served.pids()["generator"], signal.SIGKILL)
        served.wait_for_line("service restored", 60)
        os.kill(served.pids()["tokenizer"], signal.SIGKILL)
        served.wait_for_line("service restored", 60, count=2)
        os.kill(served.pids()["generator"], signal.SIGKILL)
        assert served.process.wait(60) not in (0, None)
        served.wait_for_line("error: gave up after 2 restarts in a row: generator died")
    assert re.findall(r"restarting attempt=(\d) delay_seconds=([\d.]+)", served.text) == [
        ("1", "0.0"),
        ("2", "1.0"),
    ]
    assert "giving up" in served.text
