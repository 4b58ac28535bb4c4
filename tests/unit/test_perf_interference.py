"""perf.bench_interference on the fake executor, whose steps take a time that we choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import bench_interference
from perf.bench_interference import Interference, Round, p99
from perf.records import read_records
from pocket_backend.api import EngineArgs

STEP_SECONDS = 0.01


def test_p99_is_the_largest_of_few_and_not_of_many() -> None:
    assert p99([3.0, 1.0, 2.0]) == 3.0
    assert p99([float(i) for i in range(1, 101)]) == 99.0


def test_ratio_compares_the_streams_with_the_chunks_alone() -> None:
    measured = Round((0.5, 1.0), (0.2, 1.5, 1.2), (0.01,), 1.5, 2.0)
    assert measured.ratio == 1.5


def test_streams_get_a_token_per_chunk() -> None:
    args = EngineArgs(
        model="fake",
        max_num_batched_tokens=64,
        kv_cache_tokens=4096,
        backend_options={"delay_seconds": STEP_SECONDS},
    )
    subject = Interference(args)
    made = 0

    def prompt(length: int) -> tuple[int, ...]:
        nonlocal made
        made += 1
        return tuple((made * 31 + i * made) % 255 + 1 for i in range(length))

    try:
        result = subject.run(prompt, 600, streams=4)
    finally:
        subject.close()
    assert len(result.chunks) == -(-600 // 64)
    # Beside four streams a chunk has 60 tokens. A token of every stream in every one of them, and
    # one step more at either end.
    chunks = -(-600 // 60)
    assert 4 * (chunks - 1) <= len(result.gaps) <= 4 * (chunks + 2)
    assert min(result.chunks) >= STEP_SECONDS
    assert sorted(result.gaps)[len(result.gaps) // 2] >= 0.8 * STEP_SECONDS
    assert result.first_token_beside >= chunks * STEP_SECONDS


def test_command_line_writes_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    arguments = ["--model", "fake", "--length", "600", "--rounds", "2", "--allow-busy"]
    assert bench_interference.main([*arguments, "--json", str(path)]) == 0
    assert "bar at most 2" in capsys.readouterr().out
    records = read_records(path)
    ratio = next(r for r in records if r.metric == "interference_ratio")
    assert len(ratio.samples) == 2
    assert ratio.value > 0
