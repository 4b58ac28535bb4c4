"""Verdicts of the smoke benchmark, and its references."""

from __future__ import annotations

import pytest

from perf import bench_smoke


def test_the_median_is_held_against_the_floor() -> None:
    ratio = bench_smoke.Ratio("x", "y", floor=0.5, samples=[0.1, 0.6, 0.7])
    assert ratio.passed, "one disturbed round must not fail it"
    ratio.samples += [0.2, 0.3]
    assert not ratio.passed
    text = bench_smoke.report([ratio])
    assert "BELOW" in text
    (record,) = bench_smoke.to_records([ratio])
    assert record.value == 0.3


def test_references_measure_something() -> None:
    assert bench_smoke.product_rate(64) > 1e6
    assert 0 < bench_smoke.loop_seconds() < 1


def test_without_a_model_there_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_smoke, "find_default_model", lambda: None)
    assert bench_smoke.main([]) == 2
    assert "--model" in capsys.readouterr().err
