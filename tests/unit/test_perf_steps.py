"""``perf.bench_steps``: builds take turns, and ratios are those of equal rounds."""

from __future__ import annotations

import pytest
from tiny_gguf import TinyLlama, write_gguf

from perf.bench_steps import BENCH, Case, main, own_library, table
from perf.records import Record, read_records


def record(build: int, case: Case, *samples: float) -> Record:
    return Record.of(BENCH, f"build {build}", case.name, case.size, "step_seconds", "s", samples)


def test_ratios_are_medians_of_rounds() -> None:
    case = Case("decode", 8)
    records = [record(0, case, 0.001, 0.004, 0.009), record(1, case, 0.002, 0.002, 0.003)]
    lines = table(records, [case]).splitlines()
    assert lines[0].split() == ["step", "build", "0,", "ms", "build", "1,", "ms", "0", "/", "1"]
    assert lines[2].split() == ["decode", "8", "4", "2", "2.000x"]  # of 0.5, 2 and 3


def test_two_builds_on_a_small_model(tmp_path, capsys) -> None:
    pytest.importorskip("pocket_cpp_core")
    model, result = tmp_path / "tiny.gguf", tmp_path / "steps.json"
    write_gguf(model, TinyLlama(weight_format="Q4_1", context=1024))
    builds = ["--library", own_library()] * 2
    options = ["--rows", "1,3", "--prompts", "600", "--threads", "1", "--rounds", "2"]
    status = main([*builds, *options, "--model", str(model), "--allow-busy", "--json", str(result)])
    assert status == 0
    records = read_records(result)
    assert {(r.engine, r.workload) for r in records} == {
        (build, step)
        for build in ("build 0", "build 1")
        for step in ("decode 1", "decode 3", "prompt 600")
    }
    assert all(len(r.samples) == 2 and min(r.samples) > 0 for r in records)
    assert "prompt 600" in capsys.readouterr().out
