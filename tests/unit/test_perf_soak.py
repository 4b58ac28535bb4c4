"""The verdicts of the soak: each finds the fault that it is for, and passes a healthy run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perf import metrics_overhead, soak
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
    before: dict[str, object] = {"requests": {"stop": 1, "length": 2}}
    for counted, passed in ((0, False), (1, True), (2, True), (3, False)):
        after: dict[str, object] = {"requests": {"stop": 1 + counted, "length": 2}}
        assert soak.judge_ledger(good, before, after).passed is passed


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


def test_cost_of_metrics_is_a_share_of_throughput() -> None:
    turns = [metrics_overhead.Turn(on=99.0, off=100.0), metrics_overhead.Turn(on=97.0, off=100.0)]
    *_, cost = metrics_overhead.to_records(turns, 8)
    assert cost.value == pytest.approx(0.02)
