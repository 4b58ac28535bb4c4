"""perf.bench_gap on the fake executor, and the arithmetic of StepTimes."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import bench_gap
from perf.engines.base import EngineOptions
from perf.engines.pocketllm import PocketLLMEngine
from perf.engines.step_times import COMPUTE, GAP, PARTS
from perf.records import find, read_records

DELAY = 0.004


def test_gap_and_parts_add_up() -> None:
    engine = PocketLLMEngine()
    extra = {"backend": "fake", "step_times": "parts", "with_text": True}
    options = EngineOptions(
        "fake", max_model_len=256, extra={**extra, "backend_options": {"delay_seconds": DELAY}}
    )
    engine.start(options)
    try:
        result = engine.run([[1, 2, 3], [4, 5, 6]], 12)
        one = engine.run([[7, 8, 9]], 12)
    finally:
        engine.close()
    steps = result.step_seconds
    # Steps of two tokens that another one of two follows: all but the prompts' and the last.
    assert {part: len(values) for part, values in steps.items()} == dict.fromkeys(
        (COMPUTE, GAP, *PARTS), 10
    )
    assert min(steps[COMPUTE]) >= DELAY
    for step, gap in enumerate(steps[GAP]):
        assert sum(steps[part][step] for part in PARTS) == pytest.approx(gap)
        assert gap > 0
    assert len(one.step_seconds[GAP]) == 10
    assert sum(steps[COMPUTE]) + sum(steps[GAP]) < result.wall_seconds


def test_command_line_writes_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gap.json"
    arguments = ["--model", "fake", "--rounds", "1", "--allow-busy", "--json", str(path)]
    assert bench_gap.main(arguments) == 0
    records = read_records(path)
    for streams in bench_gap.STREAMS:
        gap = find(records, engine="pocketllm", workload=f"A{streams}", metric="gap_seconds")
        assert gap is not None
        assert gap.value > 0
    printed = capsys.readouterr().out
    assert all(meaning in printed for meaning in PARTS.values())
    assert "NOT FOR PUBLICATION" in printed
