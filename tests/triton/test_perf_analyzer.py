"""`make perf-analyzer` as its documentation says: installs, sweeps, and the counts agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.analyzer.__main__ import main
from perf.records import read_records


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_counts_are_the_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--model", "fake", "--concurrency", "1,4", "--requests", "12",
                   "--max-tokens", "24", "--folder", str(tmp_path)])  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0, out
    assert "agree exactly with the server's counters at every level" in out
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    records = read_records(tmp_path / "records.json")
    levels = [(r.workload, r.concurrency) for r in records if r.metric == "generated_tokens"]
    assert levels == [("grpc", 1), ("grpc", 4), ("http", 1), ("http", 4)]
