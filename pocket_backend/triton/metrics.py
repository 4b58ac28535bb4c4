"""Engine statistics and request latencies as Triton custom metrics.

Each update is a message to the server process, so gauges and counters are written at most once a
second while busy, and once when the last stream ends.  All calls come from the engine thread except
``create``, which runs before it exists.  Names and buckets: ``observability/names.py``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from pocket_backend.api import InvalidRequestError, OverloadedError, UnsupportedFeatureError
from pocket_backend.observability import names
from pocket_backend.observability.logging import get_logger, log_event

if TYPE_CHECKING:
    from pocket_backend.api import TokenEvent
    from pocket_backend.engine.stats import EngineStats
    from pocket_backend.engine.unified import UnifiedEngine

_log = get_logger("triton.metrics")
_PERIOD = 1.0
_EXPORTED = (
    names.REQUESTS, names.REFUSED, names.TOKENS, names.STEPS, names.PREEMPTIONS,
    names.INTEGRITY_FAILURES, names.RUNNING, names.WAITING, names.SLOTS_FREE, names.KV_BLOCKS,
    names.TTFT_SECONDS, names.TPOT_SECONDS, names.DURATION_SECONDS, names.QUEUE_SECONDS,
    names.PREFILL_SECONDS, names.DECODE_SECONDS,
)  # fmt: skip


class MetricsBridge:
    """Owns the metric families. With ``pb_utils`` that has no metrics every call does nothing."""

    def __init__(self) -> None:
        self._families: list[Any] = []
        self._metrics: dict[tuple[str, str], Any] = {}
        self._last: dict[tuple[str, str], float] = {}
        self._next_flush = 0.0
        self._was_idle = False
        self._engine: UnifiedEngine | None = None

    @classmethod
    def create(cls, pb_utils: Any) -> MetricsBridge:
        """Register every series, so that a scrape before the first request shows them at zero."""
        bridge = cls()
        if not hasattr(pb_utils, "MetricFamily"):
            return bridge
        for metric in _EXPORTED:
            try:
                bridge._register(pb_utils, metric)
            except Exception as error:  # noqa: BLE001  (metrics switched off, or an older server)
                log_event(_log, logging.WARNING, "metric not exported", metric=metric.name,
                          reason=str(error))  # fmt: skip
        return bridge

    def _register(self, pb_utils: Any, metric: names.Metric) -> None:
        kinds = pb_utils.MetricFamily
        kind = {"counter": kinds.COUNTER, "gauge": kinds.GAUGE}.get(metric.kind)
        if metric.kind == "histogram":
            kind = kinds.HISTOGRAM
        family = kinds(name=metric.name, description=metric.help, kind=kind)
        self._families.append(family)
        values = metric.label_values[0] if metric.label_values else ("",)
        for value in values:
            labels = {metric.labels[0]: value} if value else {}
            extra = {"buckets": list(metric.buckets)} if metric.kind == "histogram" else {}
            self._metrics[metric.name, value] = family.Metric(labels=labels, **extra)

    def start(self, engine: UnifiedEngine) -> None:
        """Attach to a running engine; its gauges are written from the engine thread."""
        self._engine = engine
        engine.post(self._flush)

    def after_step(self, now: float, *, idle: bool) -> None:
        """Called after every step."""
        if idle and not self._was_idle and self._engine is not None:
            # After this turn: the engine's snapshot is refreshed when it finds nothing to run.
            self._engine.post(self._flush)
        elif now >= self._next_flush:
            self._next_flush = now + _PERIOD
            self._flush()
        self._was_idle = idle

    def refused(self, error: Exception) -> None:
        reason = "unavailable"
        if isinstance(error, UnsupportedFeatureError):
            reason = "unsupported"
        elif isinstance(error, InvalidRequestError):
            reason = "invalid"
        elif isinstance(error, OverloadedError):
            reason = "overloaded"
        self._add(names.REFUSED, reason, 1)

    def finished(self, event: TokenEvent) -> None:
        """Latencies of a finished request."""
        times = event.timings
        if times is None or event.finish_reason not in ("stop", "length"):
            return
        for metric, value in (
            (names.TTFT_SECONDS, times.ttft_seconds),
            (names.DURATION_SECONDS, times.total_seconds),
            (names.QUEUE_SECONDS, times.queue_seconds),
            (names.PREFILL_SECONDS, times.prefill_seconds),
            (names.DECODE_SECONDS, times.decode_seconds),
            *([(names.TPOT_SECONDS, times.tpot_seconds)] if times.tpot_seconds else []),
        ):
            series = self._metrics.get((metric.name, ""))
            if series is not None:
                series.observe(value)

    def _flush(self) -> None:
        if self._engine is None or not self._metrics:
            return
        stats: EngineStats = self._engine.stats()
        self._set(names.RUNNING, "", stats.running)
        self._set(names.WAITING, "", stats.waiting)
        self._set(names.SLOTS_FREE, "", stats.slots_free)
        for state in ("free", "used", "cached"):
            self._set(names.KV_BLOCKS, state, getattr(stats, f"blocks_{state}"))
        for reason, count in stats.requests.items():
            self._total(names.REQUESTS, reason, count)
        self._total(names.TOKENS, "prompt", stats.prompt_tokens)
        self._total(names.TOKENS, "generated", stats.generated_tokens)
        self._total(names.TOKENS, "cached", stats.cached_tokens)
        self._total(names.STEPS, "ok", stats.steps - stats.failed_steps)
        self._total(names.STEPS, "failed", stats.failed_steps)
        self._total(names.PREEMPTIONS, "", stats.preemptions)
        self._total(names.INTEGRITY_FAILURES, "", stats.integrity_failures)

    def _set(self, metric: names.Metric, label: str, value: float) -> None:
        key = (metric.name, label)
        if key in self._metrics and self._last.get(key) != value:
            self._last[key] = value
            self._metrics[key].set(value)

    def _total(self, metric: names.Metric, label: str, value: float) -> None:
        """Bring a counter up to ``value``."""
        key = (metric.name, label)
        self._add(metric, label, value - self._last.get(key, 0.0))
        self._last[key] = value

    def _add(self, metric: names.Metric, label: str, amount: float) -> None:
        series = self._metrics.get((metric.name, label))
        if series is not None and amount > 0:
            series.increment(amount)
