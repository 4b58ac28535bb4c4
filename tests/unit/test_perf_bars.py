"""Ratios point the right way and are held against the right bars."""

from __future__ import annotations

import pytest

from perf.bars import OURS, OURS_UNCACHED, SPEEDUP_BARS, judge, memory_limit, speedup
from perf.bench_engine import Bar, bars
from perf.compare import cache_rows, table, verdicts
from perf.records import Record
from perf.workloads import Point, select_workloads

_A8 = Point("A8", "decode_tokens_per_second", "tokens/s", "higher")
_COLD = Point("C cold", "wall_seconds", "s", "lower")


def _records(point: Point, values: dict[str, float]) -> list[Record]:
    return [
        Record.of("compare", engine, point.workload, 8, point.metric, point.unit, [value])
        for engine, value in values.items()
    ]


def test_speedup_follows_the_direction() -> None:
    assert speedup(_A8, 300.0, 100.0) == 3.0
    assert speedup(_COLD, 0.5, 1.5) == 3.0


def test_best_peer_has_the_best_figure_in_the_points_direction() -> None:
    high = judge(_A8, _records(_A8, {OURS: 1200.0, "vllm": 500.0, "openvino": 520.0}))
    assert (high.best_peer, high.bar, high.mark) == ("openvino", 2.3, "pass")
    assert high.ratio == pytest.approx(1200 / 520)
    low = judge(_COLD, _records(_COLD, {OURS: 1.0, "vllm": 1.35, "openvino": 6.9}))
    assert (low.best_peer, low.passed, low.mark) == ("vllm", False, "FAIL")
    assert low.ratio == pytest.approx(1.35)


def test_exactly_the_bar_passes() -> None:
    assert judge(_COLD, _records(_COLD, {OURS: 1.0, "vllm": 1.7})).passed is True


def test_engines_that_do_not_count_are_shown_but_never_the_best() -> None:
    verdict = judge(_A8, _records(_A8, {OURS: 10.0, "transformers": 99.0, "vllm": 5.0}))
    assert verdict.best_peer == "vllm"
    assert verdict.values["transformers"] == 99.0


def test_other_metrics_of_the_workload_are_not_mixed_in() -> None:
    latency = Point("A8", "ttft_seconds", "s", "lower")
    records = _records(latency, {OURS: 0.1, "vllm": 0.2}) + _records(_A8, {OURS: 9.0, "vllm": 3.0})
    verdict = judge(_A8, records)
    assert verdict.ratio == 3.0
    assert verdict.values == {OURS: 9.0, "vllm": 3.0}


def test_nothing_to_judge_without_peers_or_without_ours() -> None:
    assert judge(_A8, _records(_A8, {OURS: 1.0})).passed is None
    assert judge(_A8, _records(_A8, {"vllm": 1.0})).mark == "-"


def test_every_point_has_a_bar() -> None:
    points = {point.workload for workload in select_workloads() for point in workload.points}
    assert points == set(SPEEDUP_BARS)


def test_table_has_a_column_per_engine_and_shows_bar_and_goal() -> None:
    records = _records(_A8, {OURS: 1600.0, "vllm": 500.0}) + _records(_COLD, {OURS_UNCACHED: 9.0})
    workloads = [w for w in select_workloads() if w.name == "A8"]
    header, rows = table(verdicts(records, workloads), records)
    assert header == ("workload", OURS, "vllm", "best peer", "ratio", "bar", "result")
    assert rows == [
        ("A8, tokens/s", "1,600", "500", "vllm", "3.20x", "2.3x (goal 3x)", "pass"),
    ]


def test_prefix_cache_against_ourselves() -> None:
    rows = cache_rows(_records(_COLD, {OURS: 0.5, OURS_UNCACHED: 3.5}))
    assert rows == [("C cold, s", "0.5", "3.5", "7.0x", "6x", "pass")]


def test_memory_limit() -> None:
    assert memory_limit(100_000_000, 50_000_000) == pytest.approx(315e6)


def test_bars_of_our_own_run() -> None:
    def record(workload: str, metric: str, value: float, engine: str = OURS) -> Record:
        return Record("bench_engine", engine, workload, 1, metric, value, "", (value,))

    records = [
        record("A1", "decode_tokens_per_second", 300.0),
        record("A8", "decode_tokens_per_second", 1500.0),
        record("A1", "bandwidth_limit_ratio", 0.6),
        record("C cold", "wall_seconds", 0.5),
        record("C cold", "wall_seconds", 4.0, OURS_UNCACHED),
        record("memory", "resident_memory_bytes", 200e6),
        record("memory", "resident_memory_limit_bytes", 260e6),
        record("load warm", "load_seconds", 1.2),
    ]
    judged = {bar.name: bar for bar in bars(records)}
    assert {name: bar.passed for name, bar in judged.items()} == {
        "scaling, 8 streams over 1": True,
        "share of bandwidth limit, 1 stream": False,
        "C cold, over cache off": True,
        "resident memory": True,
        "load, file cached": False,
    }
    assert judged["scaling, 8 streams over 1"].value == 5.0
    assert bars([]) == []


def test_bar_rows_name_the_side() -> None:
    assert Bar("load", 2.0, 1.0, "s", higher=False).row() == ("load", "2 s", "at most 1", "FAIL")
