"""Engine statistics and request latencies as Triton custom metrics.

Each update is a message to the server process that waits for its answer (15 to 25 microseconds), so
what changes with every step or token is counted in the engine and written once a second while there
is something to write. All writing happens on the engine thread; registering, before it exists.
Names and buckets: ``observability/names.py``.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pocket_backend
from pocket_backend.api import (
    BackendUnavailableError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    UnsupportedFeatureError,
)
from pocket_backend.observability import names
from pocket_backend.observability.histogram import bucket_labels
from pocket_backend.observability.logging import get_logger, log_event

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pocket_backend.api import TokenEvent
    from pocket_backend.engine.stats import EngineStats
    from pocket_backend.engine.unified import UnifiedEngine
    from pocket_backend.observability.histogram import HistogramData

_log = get_logger("triton.metrics")
PERIOD_SECONDS = 1.0
"""How long what was counted may wait to be written."""
_Key = tuple[str, tuple[str, ...]]
"""A series: its name, and its labels' values."""


class TritonMetrics:
    """The series of some families. Without metrics in the server every call does nothing.

    The same family may be registered by several models; the server adds up what they write.
    """

    def __init__(self, pb_utils: Any, metrics: Sequence[names.Metric]) -> None:
        self._families: dict[str, Any] = {}
        """Kept alive as long as their series are written."""
        self._series: dict[_Key, Any] = {}
        self._last: dict[_Key, float] = {}
        self._kinds = getattr(pb_utils, "MetricFamily", None)
        try:
            for metric in metrics if self._kinds is not None else ():
                self._register(metric)
        except Exception as error:  # noqa: BLE001  (metrics switched off, or an older server)
            log_event(_log, logging.WARNING, "metrics not exported", reason=str(error))
            self._kinds = None
            self._series.clear()

    def _register(self, metric: names.Metric) -> None:
        if metric.batched:
            for suffix, label_sets in (
                ("_bucket", [{"le": bound} for bound in bucket_labels(metric.buckets)]),
                ("_count", [{}]),
                ("_sum", [{}]),
            ):
                self._add_family(metric.name + suffix, "COUNTER", metric.help, label_sets)
            return
        extra = {"buckets": list(metric.buckets)} if metric.kind == "histogram" else {}
        kind = metric.kind.upper()
        self._add_family(metric.name, kind, metric.help, metric.series_labels(), **extra)

    def _add_family(
        self,
        name: str,
        kind: str,
        description: str,
        label_sets: Sequence[Mapping[str, str]],
        **extra: Any,
    ) -> None:
        kinds: Any = self._kinds
        family = kinds(name=name, description=description, kind=getattr(kinds, kind))
        self._families[name] = family
        for labels in label_sets:
            self._series[name, tuple(labels.values())] = family.Metric(labels=dict(labels), **extra)

    def set_info(self, metric: names.Metric, *values: str) -> None:
        """Make the one series of an information metric, at 1."""
        family = self._families.get(metric.name)
        if family is not None:
            labels = dict(zip(metric.labels, values, strict=True))
            series = self._series[metric.name, values] = family.Metric(labels=labels)
            series.set(1)

    def set(self, metric: names.Metric, value: float, *labels: str) -> None:
        """Set a gauge."""
        key = (metric.name, labels)
        if key in self._series and self._last.get(key) != value:
            self._last[key] = value
            self._series[key].set(value)

    def add(self, metric: names.Metric, amount: float, *labels: str) -> None:
        """Increase a counter."""
        self._increment((metric.name, labels), amount)

    def raise_to(self, metric: names.Metric, total: float, *labels: str) -> None:
        """Bring a counter up to ``total``."""
        self._raise_to((metric.name, labels), total)

    def observe(self, metric: names.Metric, value: float) -> None:
        """One observation of a histogram that is not batched."""
        series = self._series.get((metric.name, ()))
        if series is not None:
            series.observe(value)

    def write_histogram(self, metric: names.Metric, data: HistogramData) -> None:
        """Bring a batched histogram up to ``data``. From the top, so that a scrape in between sees
        no bucket above a larger one."""
        self._raise_to((metric.name + "_count", ()), data.count)
        for bound, count in reversed(list(data.cumulative())):
            self._raise_to((metric.name + "_bucket", (bound,)), count)
        self._raise_to((metric.name + "_sum", ()), data.sum)

    def _raise_to(self, key: _Key, total: float) -> None:
        amount = total - self._last.get(key, 0.0)
        if amount > 0:
            self._last[key] = total
            self._increment(key, amount)

    def _increment(self, key: _Key, amount: float) -> None:
        series = self._series.get(key)
        if series is not None and amount > 0:
            series.increment(amount)


class MetricsBridge:
    """What the generator exports. Engine thread only, except where it says otherwise."""

    def __init__(self, pb_utils: Any) -> None:
        """Register every series, so that a scrape before the first request shows them at zero."""
        self._metrics = TritonMetrics(pb_utils, names.METRICS)
        self._changed = False
        self._closed = threading.Event()
        self._ticker: threading.Thread | None = None

    def start(self, engine: UnifiedEngine, model: str) -> None:
        """Attach to a running engine, which serves ``model``. Once, on any thread."""
        info = (pocket_backend.__version__, engine.health().backend, model)
        engine.post(lambda: self._metrics.set_info(names.ENGINE_INFO, *info))
        engine.post(lambda: self._flush(engine))
        self._ticker = threading.Thread(
            target=self._tick, args=(engine,), name="pocket-metrics", daemon=True
        )
        self._ticker.start()

    def close(self) -> None:
        """Write no more. Any thread; idempotent."""
        self._closed.set()
        if self._ticker is not None:
            self._ticker.join()

    def after_step(self) -> None:
        """Something happened; it is written within a second."""
        self._changed = True

    def _tick(self, engine: UnifiedEngine) -> None:
        """Ask the engine thread to write. A thread of its own, since an idle engine sleeps."""
        while not self._closed.wait(PERIOD_SECONDS):
            if self._changed:
                self._changed = False
                engine.post(lambda: self._flush(engine))

    def refused(self, error: Exception) -> None:
        """A request that the engine never took."""
        self._metrics.add(names.REFUSED, 1, refusal_reason(error))

    def finished(self, event: TokenEvent, *, cancel_reason: str = "disconnected") -> None:
        """A request of which nothing more is sent; ``event`` is the last that the engine gave.

        ``cancel_reason`` is one of ``names.CANCEL_REASONS`` and matters if it was cancelled. (The
        event says nothing when sending failed: then the engine cancels the request.)
        """
        metrics, times, usage = self._metrics, event.timings, event.usage
        if event.finish_reason in (None, "cancelled"):
            metrics.add(names.CANCELLED, 1, cancel_reason)
        elif event.finish_reason == "error":
            metrics.add(names.FAILED, 1, failure_reason(event.error))
        if times is None or usage is None or event.finish_reason not in ("stop", "length"):
            return
        metrics.observe(names.TTFT_SECONDS, times.ttft_seconds)
        metrics.observe(names.DURATION_SECONDS, times.total_seconds)
        metrics.observe(names.QUEUE_SECONDS, times.queue_seconds)
        metrics.observe(names.PREFILL_SECONDS, times.prefill_seconds)
        metrics.observe(names.DECODE_SECONDS, times.decode_seconds)
        if usage.completion_tokens > 1:
            metrics.observe(names.TPOT_SECONDS, times.tpot_seconds)
        metrics.observe(names.PROMPT_LENGTH, usage.prompt_tokens)
        metrics.observe(names.OUTPUT_LENGTH, usage.completion_tokens)

    def _flush(self, engine: UnifiedEngine) -> None:
        stats: EngineStats = engine.stats()
        metrics = self._metrics
        metrics.set(names.RUNNING, stats.running)
        metrics.set(names.WAITING, stats.waiting)
        metrics.set(names.SLOTS_FREE, stats.slots_free)
        metrics.set(names.KV_BLOCKS, stats.blocks_free, "free")
        metrics.set(names.KV_BLOCKS, stats.blocks_used, "used")
        metrics.set(names.KV_BLOCKS, stats.blocks_cached, "cached")
        metrics.set(names.SNAPSHOTS, stats.snapshots_free, "free")
        metrics.set(names.SNAPSHOTS, stats.snapshots_writing, "writing")
        metrics.set(names.SNAPSHOTS, stats.snapshots_saved, "saved")
        metrics.set(names.SNAPSHOT_BYTES, stats.snapshot_saved_bytes)
        metrics.raise_to(names.SNAPSHOT_SAVES, stats.snapshot_saves)
        metrics.raise_to(names.SNAPSHOT_HITS, stats.snapshot_hits)
        metrics.raise_to(names.SNAPSHOT_EVICTIONS, stats.snapshots_replaced, "newer")
        metrics.raise_to(names.SNAPSHOT_EVICTIONS, stats.snapshots_dropped, "block")
        for reason, count in stats.requests.items():
            metrics.raise_to(names.REQUESTS, count, reason)
        metrics.raise_to(names.TOKENS, stats.prompt_tokens, "prompt")
        metrics.raise_to(names.TOKENS, stats.generated_tokens, "generated")
        metrics.raise_to(names.TOKENS, stats.cached_tokens, "cached")
        metrics.raise_to(names.PREFIX_QUERIES, stats.prefix_query_tokens)
        metrics.raise_to(names.PREFIX_HITS, stats.prefix_hit_tokens)
        metrics.raise_to(names.STEPS, stats.steps - stats.failed_steps, "ok")
        metrics.raise_to(names.STEPS, stats.failed_steps, "failed")
        metrics.raise_to(names.PREEMPTIONS, stats.preemptions)
        metrics.raise_to(names.STALLS, stats.stalls)
        metrics.raise_to(names.INTEGRITY_FAILURES, stats.integrity_failures)
        for metric in names.METRICS:
            if metric.batched:
                metrics.write_histogram(metric, stats.histograms[metric.name])


class RefusalCounter:
    """Refused requests of a model that has no engine. One thread."""

    def __init__(self, pb_utils: Any) -> None:
        self._metrics = TritonMetrics(pb_utils, (names.REFUSED,))

    def refused(self, error: Exception) -> None:
        self._metrics.add(names.REFUSED, 1, refusal_reason(error))


def refusal_reason(error: Exception | None) -> str:
    """One of ``names.REFUSAL_REASONS``."""
    if isinstance(error, UnsupportedFeatureError):
        return "unsupported"
    if isinstance(error, InvalidRequestError):
        return "invalid"
    if isinstance(error, OverloadedError):
        return "overloaded"
    return "unavailable" if isinstance(error, BackendUnavailableError) else "internal"


def failure_reason(error: Exception | None) -> str:
    """One of ``names.FAILURE_REASONS``."""
    if isinstance(error, DeadlineExceededError):
        return "deadline"
    reason = refusal_reason(error)
    return "invalid" if reason == "unsupported" else reason
