"""``perf.bench_triton`` runs as its documentation says: here on the fake engine, for its form."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import bench_triton
from perf.records import find, read_records


def test_both_sides_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The benchmark pins its process to two CPUs; the test session must not stay pinned.
    monkeypatch.setattr("perf.run_options.pin_to", lambda _threads: None)
    monkeypatch.setattr(bench_triton, "CACHE", tmp_path)
    json = tmp_path / "run.json"
    status = bench_triton.main(
        [
            "--model",
            "fake",
            "--streams",
            "2,8",
            "--rounds",
            "2",
            "--allow-busy",
            "--json",
            str(json),
        ]
    )
    out = capsys.readouterr().out
    assert status == 0, out
    assert "NOT FOR PUBLICATION" in out
    records = read_records(json)
    assert len(bench_triton.throughput_rows(records)) == 2
    assert all(len(record.samples) == 2 for record in records)
    generator = find(
        records,
        engine=bench_triton.THROUGH_TRITON,
        workload="A8",
        metric="generator_cpu_seconds",
    )
    assert generator is not None
    assert generator.value > 0
