"""A histogram that costs the engine thread one append per value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class HistogramData:
    """What was observed so far. ``counts`` has one entry per bucket and one for what is above all
    of them; a value equal to a boundary belongs below it, as in Prometheus."""

    buckets: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """(``le``, values at or below it) per boundary, ``+Inf`` last."""
        return zip(bucket_labels(self.buckets), accumulate(self.counts), strict=True)


_MANY = 1024
"""Values that are kept uncounted at most."""


class Histogram:
    """Counts values by bucket. Not thread-safe: one thread observes and reads.

    Values are counted when somebody reads, many at a time: between two steps the buckets' bounds
    are not in the caches, and a search through them costs several misses.
    """

    __slots__ = ("_buckets", "_counts", "_new", "_sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        """``buckets``: upper boundaries, ascending, without infinity."""
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._new: list[float] = []

    def observe(self, value: float) -> None:
        self._new.append(value)
        if len(self._new) >= _MANY:
            self._count()

    def data(self) -> HistogramData:
        self._count()
        return HistogramData(self._buckets, tuple(self._counts), self._sum)

    def _count(self) -> None:
        for value in self._new:
            self._counts[bisect_left(self._buckets, value)] += 1
            self._sum += value
        self._new.clear()


def bucket_labels(buckets: tuple[float, ...]) -> tuple[str, ...]:
    """Values of the label ``le``, as Prometheus clients write them."""
    return (*(f"{bound:g}" for bound in buckets), "+Inf")
