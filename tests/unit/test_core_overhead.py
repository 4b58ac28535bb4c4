"""The overhead benchmark runs and writes records that any other benchmark's reader takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import bench_scheduler
from perf.records import read_records


def test_quick_run_prints_a_table_and_writes_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.json"
    assert bench_scheduler.main(["--quick", "--json", str(path)]) == 0
    assert "schedule + update" in capsys.readouterr().out
    records = read_records(path)
    assert [(r.concurrency, r.metric) for r in records] == [
        (1, "step_seconds"),
        (1, "step_seconds_p99"),
        (8, "step_seconds"),
        (8, "step_seconds_p99"),
    ]
    assert all(r.bench == "bench_scheduler" and r.unit == "s" and r.value > 0 for r in records)
    assert [len(r.samples) for r in records] == [20, 0, 20, 0]


def test_quantiles() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert bench_scheduler.quantile(values, 0.99) == 100.0
    assert bench_scheduler.quantile(values, 0.5) == 51.0
    assert bench_scheduler.quantile([3.0], 0.99) == 3.0
