"""The verdicts of the soak: each finds the fault that it is for, and passes a healthy run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from perf import metrics_overhead, soak
from perf.load.fill import PROMPT_TOKENS, fill_pool
from perf.load.mix import OK, Outcome
from perf.load.resources import Resources, read_resources

HEALTHY = Resources(processes=5, rss_bytes=200 << 20, file_descriptors=90, threads=60, shm_bytes=3)


def samples(count: int = 40, **growth: int) -> list[soak.Sample]:
    """Level, with ``growth`` of some resources from sample to sample."""
    return [
        soak.Sample(
            5.0 * index,
            replace(HEALTHY, **{k: getattr(HEALTHY, k) + index * v for k, v in growth.items()}),
            blocks_ok=True,
        )
        for index in range(count)
    ]


def failed(checks: list[soak.Check]) -> list[str]:
    return [check.name for check in checks if not check.passed]


@pytest.mark.parametrize(
    ("growth", "expected"),
    [
        ({}, []),
        ({"rss_bytes": 3 << 20}, ["memory does not grow"]),
        ({"rss_bytes": 1 << 10}, []),
        ({"shm_bytes": 1}, ["shared memory does not grow"]),
        ({"file_descriptors": 1}, ["file descriptors do not grow"]),
        ({"threads": 1}, ["threads do not grow"]),
        ({"processes": 1}, ["processes do not grow"]),
    ],
)
def test_growth_is_found(growth: dict[str, int], expected: list[str]) -> None:
    assert failed(soak.judge_resources(samples(**growth))) == expected


def test_warm_up_is_no_growth_and_too_short_a_run_no_proof() -> None:
    run = samples()
    warming = [
        replace(sample, resources=replace(sample.resources, rss_bytes=index << 20))
        for index, sample in enumerate(run[:10])
    ]
    assert failed(soak.judge_resources(warming + run[10:])) == []
    assert failed(soak.judge_resources(run[:7])) == ["nothing grows"]


class FillingClient:
    """As ``Client``, over a pool that each prompt fills by ``step`` blocks, from ``used`` on."""

    def __init__(self, step: int, used: int = 0) -> None:
        self._step, self._used = step, used
        self.prompts: list[tuple[int, ...]] = []

    def stats(self, *, timeout: float) -> dict[str, object]:
        return {"blocks_free": max(0, 200 - self._used), "blocks_total": 200}

    def generate(self, prompt: list[int], **_: object) -> None:
        self.prompts.append(tuple(prompt))
        self._used += self._step


def test_the_pool_is_filled_with_prompts_that_share_nothing() -> None:
    client = FillingClient(step=31)
    fill = fill_pool(client)  # type: ignore[arg-type]
    assert (fill.requests, fill.complete) == (7, True)
    assert len({prompt[:16] for prompt in client.prompts}) == 7
    assert all(len(prompt) == PROMPT_TOKENS for prompt in client.prompts)
    full = fill_pool(FillingClient(step=31, used=198))  # type: ignore[arg-type]
    assert (full.requests, full.complete) == (0, True)
    never = fill_pool(FillingClient(step=0))  # type: ignore[arg-type]
    assert not never.complete
    assert never.requests == 2 * 200 * 16 // PROMPT_TOKENS + 1


def test_one_wrong_sum_of_blocks_is_enough() -> None:
    run = samples()
    run[17] = replace(run[17], blocks_ok=False)
    assert failed(soak.judge_resources(run)) == ["KV blocks always add up"]


def test_latency_drift_is_found() -> None:
    level = [Outcome("grpc", i, ttft=0.1) for i in range(30)]
    rising = [Outcome("grpc", i, ttft=0.1 * (1 + i / 10)) for i in range(30)]
    assert soak.judge_latency("ttft", level, lambda o: o.ttft).passed
    assert not soak.judge_latency("ttft", rising, lambda o: o.ttft).passed
    assert not soak.judge_latency("ttft", level[:6], lambda o: o.ttft).passed


def test_bad_ends_and_lost_requests_are_found() -> None:
    good = [Outcome("grpc", 0.0, OK, 3), Outcome("leave", 0.0, OK)]
    bad = [*good, Outcome("deadline", 0.0, "ended without DeadlineExceededError")]
    assert failed(soak.judge_outcomes(good)) == []
    assert failed(soak.judge_outcomes(bad)) == ["every request ended as it should"]
    assert failed(soak.judge_outcomes([])) == ["every request ended as it should"]


@pytest.mark.parametrize(
    ("changed", "passed"),
    [
        ({"stop": 1}, True),
        ({"stop": 1, "cancelled": 1}, True),
        ({"stop": 2}, True),
        ({}, False),
        ({"stop": 3}, False),
        ({"stop": 1, "cancelled": 2}, False),
        ({"stop": 1, "error": 2}, False),
        ({"stop": 1, "tokens": -1}, False),
    ],
    ids=str,
)
def test_the_ledger_bounds_every_end(changed: dict[str, int], passed: bool) -> None:
    """One answer of three tokens, one client that left."""
    outcomes = [Outcome("grpc", 0.0, OK, 3), Outcome("leave", 0.0, OK)]
    before: dict[str, object] = {"requests": {"stop": 1, "length": 2}, "generated_tokens": 10}
    after: dict[str, object] = {
        "requests": {
            "stop": 1 + changed.get("stop", 0),
            "length": 2,
            "cancelled": changed.get("cancelled", 0),
            "error": changed.get("error", 0),
        },
        "generated_tokens": 13 + changed.get("tokens", 0),
    }
    assert soak.judge_ledger(outcomes, before, after).passed is passed


def test_a_cancelled_request_must_have_been_counted() -> None:
    outcomes = [Outcome("cancel", 0.0, OK)]
    before: dict[str, object] = {"requests": {}, "generated_tokens": 0}
    for requests, passed in (({}, False), ({"cancelled": 1}, True), ({"cancelled": 2}, False)):
        after: dict[str, object] = {"requests": requests, "generated_tokens": 0}
        assert soak.judge_ledger(outcomes, before, after).passed is passed


def test_too_little_is_no_proof() -> None:
    enough = [Outcome(kind, 0.0) for kind in ("grpc", "leave") for _ in range(5)]
    assert soak.judge_effort(0.34, ("grpc", "leave"), enough).passed
    assert not soak.judge_effort(0.1, ("grpc", "leave"), enough).passed
    rare = soak.judge_effort(0.34, ("grpc", "leave"), enough[:-1])
    assert not rare.passed
    assert "4 of leave" in rare.detail


def test_the_slope_of_memory() -> None:
    assert soak.mib_per_hour(samples(rss_bytes=1 << 20)) == pytest.approx(720)
    assert soak.mib_per_hour(samples()[:1]) == 0.0


def test_resources_of_a_process_tree(tmp_path: Path) -> None:
    """A child with a known number of open files."""
    code = "import sys; files = [open('/dev/null') for _ in range(40)]; print(flush=True); input()"
    before = read_resources(os.getpid(), "no-such-mark")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        during = read_resources(os.getpid(), "no-such-mark")
        child.stdin.write(b"\n")
    assert during.processes == before.processes + 1
    assert during.file_descriptors >= before.file_descriptors + 40
    assert during.rss_bytes > before.rss_bytes
    assert during.shm_bytes == 0


def turns(*costs: float) -> list[metrics_overhead.Turn]:
    return [metrics_overhead.Turn(on=100.0 * (1 - cost), off=100.0) for cost in costs]


def test_cost_of_metrics_is_a_share_of_throughput() -> None:
    *_, cost = metrics_overhead.to_records(turns(0.01, 0.03), 8)
    assert cost.value == pytest.approx(0.02)


def test_the_interval_of_a_median() -> None:
    assert metrics_overhead.median_interval([1.0] * 5) is None
    assert metrics_overhead.median_interval([6.0, 2.0, 3.0, 4.0, 5.0, 1.0]) == (1.0, 6.0)
    assert metrics_overhead.median_interval([float(n) for n in range(1, 17)]) == (4.0, 13.0)


@pytest.mark.parametrize(
    ("costs", "within", "word"),
    [
        ([0.001, 0.002, 0.003] * 5, True, "within"),
        ([0.03, 0.04, 0.05] * 5, False, "ABOVE"),
        ([-0.3, 0.001, 0.3] * 5, False, "UNDECIDED"),
        ([0.001] * 5, False, "UNDECIDED: too few"),
        ([-0.1, -0.2, -0.11] * 5, False, "UNSOUND"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_bar_is_not_met_by_accident(costs: list[float], within: bool, word: str) -> None:
    verdict = metrics_overhead.judge(turns(*costs))
    assert verdict.within is within
    assert word in str(verdict)


@pytest.fixture
def endpoint() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'pocket_tokens_total{type="generated"} 64\n')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()


def test_the_two_servers_must_differ(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_overhead, "_COUNTERS_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        nothing = f"http://127.0.0.1:{free.getsockname()[1]}/metrics"
    metrics_overhead.check_sides(endpoint, nothing, 64)
    with pytest.raises(metrics_overhead.SidesError, match="counted 64 of 65"):
        metrics_overhead.check_sides(endpoint, nothing, 65)
    with pytest.raises(metrics_overhead.SidesError, match="should have no metrics"):
        metrics_overhead.check_sides(endpoint, endpoint, 64)
