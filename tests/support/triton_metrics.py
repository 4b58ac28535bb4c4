"""Doubles of Triton's custom metrics, and a reader of the text that a scrape returns."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping
from typing import Any, ClassVar

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?P<labels>\{[^}]*\})? (?P<value>\S+)")


def parse_metrics(text: str) -> dict[str, float]:
    """``name{labels}`` to value, as written."""
    return {
        match["name"] + (match["labels"] or ""): float(match["value"])
        for line in text.splitlines()
        if (match := _SAMPLE.fullmatch(line))
    }


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return parse_metrics(answer.read().decode())


class FakeMetric:
    """One series; it accepts only what Triton accepts."""

    def __init__(self, kind: str, buckets: list[float] | None) -> None:
        self.kind, self.buckets = kind, buckets
        self.value = 0.0
        self.observations: list[float] = []
        self.writes = 0

    def increment(self, amount: float) -> None:
        assert self.kind in ("counter", "gauge")
        assert amount >= 0 or self.kind == "gauge"
        self.value += amount
        self.writes += 1

    def set(self, value: float) -> None:
        assert self.kind == "gauge"
        self.value = value
        self.writes += 1

    def observe(self, value: float) -> None:
        assert self.kind == "histogram"
        self.observations.append(value)
        self.writes += 1


class FakeMetricFamily:
    """``pb_utils.MetricFamily``. A subclass per test (``fresh``) holds what was registered."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    series: ClassVar[dict[str, FakeMetric]] = {}

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        assert description
        self._name, self._kind = name, kind

    @classmethod
    def fresh(cls) -> type[FakeMetricFamily]:
        return type("Family", (cls,), {"series": {}})

    def Metric(  # noqa: N802  (Triton's name)
        self, *, labels: Mapping[str, str], buckets: list[float] | None = None
    ) -> Any:
        assert (buckets is not None) == (self._kind == "histogram")
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        key = f"{self._name}{{{text}}}" if text else self._name
        return self.series.setdefault(key, FakeMetric(self._kind, buckets))

    @classmethod
    def value(cls, key: str) -> float:
        return cls.series[key].value
