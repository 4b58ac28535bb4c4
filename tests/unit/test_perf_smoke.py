"""Verdicts of the smoke benchmark, and its references."""

from __future__ import annotations

from typing import Any

import pytest

from perf import bench_smoke
from pocket_backend.core import ContinuousBatchScheduler


def test_a_disturbed_round_decides_nothing() -> None:
    ratio = bench_smoke.Ratio("x", "y", floor=0.5)
    ratio.add(0.1, 1.0)  # ours was disturbed
    ratio.add(0.6, 0.3)  # the reference was
    ratio.add(0.58, 1.0)
    assert ratio.value == pytest.approx(0.6)
    assert ratio.passed
    (record,) = bench_smoke.to_records([ratio])
    assert record.value == pytest.approx(0.6)
    assert record.samples == pytest.approx((0.1, 2.0, 0.58))


def test_ours_slow_in_every_round_is_found() -> None:
    ratio = bench_smoke.Ratio("x", "y", floor=0.5)
    for ours, reference in ((0.4, 1.0), (0.3, 0.2), (0.45, 0.9)):
        ratio.add(ours, reference)
    assert not ratio.passed, "one slow reference must not hide it"
    assert "BELOW" in bench_smoke.report([ratio])


def test_floors_know_the_machine() -> None:
    vnni, plain = bench_smoke.ratios(vnni=True), bench_smoke.ratios(vnni=False)
    assert vnni.keys() == plain.keys()
    for name, ratio in vnni.items():
        assert 0 < plain[name].floor <= ratio.floor
    assert plain["scaling"].floor > 1, "streams one after the other must fail"


def test_references_measure_something() -> None:
    assert bench_smoke.product_rate(64) > 1e6
    assert 0 < bench_smoke.loop_seconds() < 1


def test_a_scheduler_that_became_quadratic_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A regression as somebody might write it: each step compares all running sequences."""
    real = ContinuousBatchScheduler.update

    def slow(self: ContinuousBatchScheduler, plan: Any, outputs: Any, now: float) -> Any:
        running = list(self._life.running)
        assert sum(a is b for a in running for b in running) == len(running)
        return real(self, plan, outputs, now)

    monkeypatch.setattr(ContinuousBatchScheduler, "update", slow)
    ratio = bench_smoke.ratios(vnni=True)["scheduler"]
    for _ in range(3):
        bench_smoke.measure_scheduler(ratio)
    assert len(ratio.samples) == 3
    assert not ratio.passed, ratio.value


def test_without_a_model_there_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_smoke, "find_default_model", lambda: None)
    assert bench_smoke.main([]) == 2
    assert "--model" in capsys.readouterr().err
