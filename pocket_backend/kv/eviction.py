"""Which idle cached block is given up first.

Candidates are idle *leaves* of the prefix tree, so a prompt's tail always goes before its head and
no descendant is ever cut off from its root; a policy only ranks them. The heap is lazy: a leaf that
comes back into use just loses its stamp, and its entry is dropped when it surfaces.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pocket_backend.kv.radix import CacheNode

Rank = Callable[["CacheNode"], tuple[int, int]]
"""Lower ranks are evicted first. May depend only on fields that are constant while idle."""


def lru(node: CacheNode) -> tuple[int, int]:
    """Least recently used."""
    return (node.last_used, 0)


def lfu(node: CacheNode) -> tuple[int, int]:
    """Fewest hits, then least recently used."""
    return (node.hits, node.last_used)


def fifo(node: CacheNode) -> tuple[int, int]:
    """Oldest entry, however often it was hit."""
    return (node.created, 0)


POLICIES: Mapping[str, Rank] = MappingProxyType({"lru": lru, "lfu": lfu, "fifo": fifo})

NOT_QUEUED = -1
_SLACK = 64
"""Stale heap entries that are tolerated beyond the live ones before the heap is rebuilt."""


class EvictionQueue:
    """Idle leaves in eviction order: O(log n) push and pop, O(1) discard."""

    __slots__ = ("_heap", "_live", "_rank", "_stamp")

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._heap: list[tuple[tuple[int, int], int, CacheNode]] = []
        self._stamp = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, node: CacheNode) -> None:
        """Queue a leaf that has just become idle."""
        self._stamp += 1
        node.stamp = self._stamp
        self._live += 1
        # The stamp is unique, so nodes are never compared.
        heapq.heappush(self._heap, (self._rank(node), self._stamp, node))
        if len(self._heap) > 2 * self._live + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].stamp == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, node: CacheNode) -> None:
        """The node is in use again, or gone; harmless if it was not queued."""
        if node.stamp != NOT_QUEUED:
            node.stamp = NOT_QUEUED
            self._live -= 1

    def pop(self) -> CacheNode | None:
        """Remove and return the first leaf; None when nothing is idle."""
        while self._heap:
            _, stamp, node = heapq.heappop(self._heap)
            if node.stamp == stamp:
                node.stamp = NOT_QUEUED
                self._live -= 1
                return node
        return None
