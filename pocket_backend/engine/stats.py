"""Counters and gauges of an engine, as one snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING

from pocket_backend.observability import names
from pocket_backend.observability.histogram import Histogram, HistogramData

if TYPE_CHECKING:
    from pocket_backend.core import SchedulerStats
    from pocket_backend.core.step import MemoryInfo

_BATCHED = tuple(metric for metric in names.METRICS if metric.batched)


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start. Written by the engine thread only."""

    requests: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
    )
    """Finished requests by finish reason."""
    prompt_tokens: int = 0
    """Of requests that have their first token; so are ``cached_tokens``."""
    generated_tokens: int = 0
    """As they come, also of requests that end badly later."""
    cached_tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    integrity_failures: int = 0
    stalls: int = 0
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {metric.name: Histogram(metric.buckets) for metric in _BATCHED}
    )
    """What is measured per step or token, by metric name."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One consistent snapshot, taken on the engine thread every 0.1 s of steps and when idle.

    free + used + cached blocks = total, always.
    """

    waiting: int = 0
    running: int = 0
    slots_free: int = 0
    slots_total: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    snapshots_free: int = 0
    """Of models that keep a recurrent state. free + writing + saved = total."""
    snapshots_writing: int = 0
    snapshots_saved: int = 0
    snapshots_total: int = 0
    snapshot_saved_bytes: int = 0
    snapshot_saves: int = 0
    snapshot_hits: int = 0
    snapshots_replaced: int = 0
    snapshots_dropped: int = 0
    requests: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Finished requests by finish reason."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    integrity_failures: int = 0
    stalls: int = 0
    histograms: Mapping[str, HistogramData] = field(default_factory=lambda: MappingProxyType({}))
    """What is measured per step or token, by metric name (``observability/names.py``)."""

    def as_dict(self) -> dict[str, object]:
        """For JSON; a histogram as its count and sum, and the counts of its buckets."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        histograms = {
            name: {
                "count": data.count,
                "sum": data.sum,
                "bounds": list(data.buckets),
                "counts": list(data.counts),
            }
            for name, data in self.histograms.items()
        }
        return {**values, "requests": dict(self.requests), "histograms": histograms}


def make_stats(
    scheduler: SchedulerStats, counters: EngineCounters, memory: MemoryInfo
) -> EngineStats:
    """``memory``: what the scheduler was built from."""
    blocks, snapshots = scheduler.blocks, scheduler.snapshots
    return EngineStats(
        waiting=scheduler.waiting,
        running=scheduler.running,
        slots_free=scheduler.free_slots,
        slots_total=memory.max_slots,
        blocks_free=blocks.free,
        blocks_used=blocks.in_use,
        blocks_cached=blocks.cached_only,
        blocks_total=blocks.total,
        snapshots_free=snapshots.free,
        snapshots_writing=snapshots.writing,
        snapshots_saved=snapshots.saved,
        snapshots_total=snapshots.total,
        snapshot_saved_bytes=snapshots.saved * memory.state_bytes,
        snapshot_saves=snapshots.saves,
        snapshot_hits=snapshots.hits,
        snapshots_replaced=snapshots.replaced,
        snapshots_dropped=snapshots.dropped,
        requests=MappingProxyType(dict(counters.requests)),
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        cached_tokens=counters.cached_tokens,
        computed_tokens=scheduler.computed_tokens,
        prefix_query_tokens=scheduler.prefix_query_tokens,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        steps=counters.steps,
        failed_steps=counters.failed_steps,
        preemptions=scheduler.preemptions,
        integrity_failures=counters.integrity_failures,
        stalls=counters.stalls,
        histograms=MappingProxyType(
            {name: histogram.data() for name, histogram in counters.histograms.items()}
        ),
    )
