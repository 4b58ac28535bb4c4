"""The performance bars of the design, and how a run's figures are held against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perf.records import Record, find
from perf.workloads import Point

OURS = "pocketllm"
OURS_UNCACHED = "pocketllm, prefix cache off"
JUDGED_PEERS = ("openvino", "vllm", "llama.cpp Q4_1", "llama.cpp Q4_0")
"""Engines that count for "the best peer"; others are shown for orientation."""

SPEEDUP_BARS: Mapping[str, float] = {
    "A1": 1.7,
    "A2": 1.7,
    "A4": 2.3,
    "A8": 2.3,
    "A16": 2.3,
    "B1024": 1.5,
    "B4096": 1.4,
    "C cold": 1.7,
    "C warm": 1.7,
}
"""Ours against the best peer of the same run."""
SPEEDUP_GOALS: Mapping[str, float] = {"A8": 3.0}
SCALING_BAR = 4.5
"""Aggregate tokens/s at 8 streams over 1 stream."""
BANDWIDTH_BAR = 0.70
"""Share of the memory-bandwidth limit that decoding at 1 stream reaches."""
CACHE_BAR = 6.0
"""C against ourselves with the prefix cache off."""
LOAD_SECONDS_BAR = 1.0
END_TO_END_BAR = 0.85
"""Tokens/s through Triton over those of the engine in process, at 8 streams."""
MEMORY_WEIGHTS_FACTOR = 1.15
MEMORY_FIXED_BYTES = 150_000_000


def speedup(point: Point, ours: float, theirs: float) -> float:
    """How many times better ours is: above 1 is better, whichever way the figure counts."""
    return ours / theirs if point.better == "higher" else theirs / ours


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the comparison."""

    point: Point
    values: Mapping[str, float]
    """Median per engine that ran the workload."""
    best_peer: str | None
    ratio: float | None
    bar: float | None

    @property
    def passed(self) -> bool | None:
        """None when there is nothing to judge: no peer, or no bar for this row."""
        if self.ratio is None or self.bar is None:
            return None
        return self.ratio >= self.bar

    @property
    def mark(self) -> str:
        return {True: "pass", False: "FAIL", None: "-"}[self.passed]


def judge(point: Point, records: Sequence[Record]) -> Verdict:
    """Ours against the best judged peer in ``records``.

    The best peer is the one with the best median; the ratio is that of the medians of the same run.
    """
    mine = find(records, engine=OURS, workload=point.workload, metric=point.metric)
    values = {
        record.engine: record.value
        for record in records
        if (record.workload, record.metric) == (point.workload, point.metric)
    }
    peers = {name: values[name] for name in JUDGED_PEERS if name in values}
    pick = max if point.better == "higher" else min
    best = pick(peers, key=lambda name: peers[name]) if peers else None
    ratio = speedup(point, mine.value, peers[best]) if mine and best else None
    return Verdict(point, values, best, ratio, SPEEDUP_BARS.get(point.workload))


def memory_limit(weight_bytes: int, kv_cache_bytes: int) -> float:
    """Resident bytes that the generator may take."""
    return weight_bytes * MEMORY_WEIGHTS_FACTOR + kv_cache_bytes + MEMORY_FIXED_BYTES
