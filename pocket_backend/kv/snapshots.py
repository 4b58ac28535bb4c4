"""Ids of state snapshots: which are free, being written, or kept with a cached block.

A snapshot is the recurrent state after exactly the tokens of a cached path; it belongs to the
path's last node and goes with it. Storage is the executor's, as with blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pocket_backend.kv.pool import IntegrityError

if TYPE_CHECKING:
    from pocket_backend.kv.radix import CacheNode


@dataclass(frozen=True, slots=True)
class SnapshotUsage:
    """Snapshots by state (the three add up to ``total``), and counts since the start."""

    free: int = 0
    writing: int = 0
    """Reserved for the step in flight."""
    saved: int = 0
    total: int = 0
    saves: int = 0
    hits: int = 0
    """Sequences that started from a snapshot."""
    replaced: int = 0
    """Saved ones given up for newer ones."""
    dropped: int = 0
    """Saved ones that went with their KV block."""


class SnapshotPool:
    """``num_snapshots`` ids: free, taken by a sequence whose step writes it, or kept by a node.

    Kept ones are given up in order of their last use when another is wanted, except while somebody
    is still to read them (``pin``). O(1) each, O(pinned) for ``take``. Not thread-safe; the block
    manager owns it.
    """

    __slots__ = (
        "_free", "_kept", "_pins", "num_dropped", "num_evicted", "num_saved", "num_snapshots",
    )  # fmt: skip

    def __init__(self, num_snapshots: int) -> None:
        if num_snapshots < 0:
            raise ValueError(f"num_snapshots: got {num_snapshots}; must be at least 0")
        self.num_snapshots = num_snapshots
        self.num_evicted = 0
        """Kept snapshots given up for new ones since the start."""
        self.num_dropped = 0
        """Kept snapshots that left with their node since the start."""
        self.num_saved = 0
        """Snapshots that became a node's since the start."""
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._kept: OrderedDict[CacheNode, int] = OrderedDict()
        """Least recently used first."""
        self._pins: dict[CacheNode, int] = {}

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def take(self) -> int | None:
        """An id to write to, at the cost of the least recently used one; None if all are taken or
        pinned."""
        if self._free:
            return self._free.pop()
        for node in self._kept:
            if node not in self._pins:
                self.num_evicted += 1
                return self._kept.pop(node)
        return None

    def give_back(self, snapshot: int) -> None:
        """A taken id that was not kept is free again."""
        self._free.append(snapshot)

    def of(self, node: CacheNode) -> int | None:
        """The snapshot of the state after ``node``, if there is one."""
        return self._kept.get(node)

    def keep(self, node: CacheNode, snapshot: int) -> None:
        """``snapshot``, taken before, holds the state after ``node``. One that the node has already
        is as good: ours is free again."""
        if node in self._kept:
            self.give_back(snapshot)
        else:
            self._kept[node] = snapshot
            self.num_saved += 1
        self._kept.move_to_end(node)

    def drop(self, node: CacheNode) -> None:
        """The node leaves the tree."""
        if node in self._pins:
            raise IntegrityError(f"KV block {node.block} goes while its snapshot is to be read")
        snapshot = self._kept.pop(node, None)
        if snapshot is not None:
            self.num_dropped += 1
            self._free.append(snapshot)

    def pin(self, node: CacheNode) -> int:
        """Keep the node's snapshot until ``unpin``: a use of it. Returns its id."""
        self._kept.move_to_end(node)
        self._pins[node] = self._pins.get(node, 0) + 1
        return self._kept[node]

    def unpin(self, node: CacheNode) -> None:
        left = self._pins[node] - 1
        if left:
            self._pins[node] = left
        else:
            del self._pins[node]

    def usage(self, hits: int) -> SnapshotUsage:
        """``hits``: how often one was read."""
        free, saved = len(self._free), len(self._kept)
        return SnapshotUsage(
            free=free,
            writing=self.num_snapshots - free - saved,
            saved=saved,
            total=self.num_snapshots,
            saves=self.num_saved,
            hits=hits,
            replaced=self.num_evicted,
            dropped=self.num_dropped,
        )

    def check(self, taken: list[int], pinned: list[CacheNode]) -> None:
        """Compare with the ids that sequences hold and the nodes that they are still to read.

        Raises:
            IntegrityError: an id is lost or in two places, or pins do not add up.
        """
        places = sorted([*self._free, *self._kept.values(), *taken])
        if places != list(range(self.num_snapshots)):
            raise IntegrityError(
                f"snapshots free {self._free}, kept {list(self._kept.values())}, taken {taken} "
                f"are not each of {self.num_snapshots} once"
            )
        counts: dict[CacheNode, int] = {}
        for node in pinned:
            counts[node] = counts.get(node, 0) + 1
        if counts != self._pins or not all(node in self._kept for node in counts):
            raise IntegrityError(f"{len(self._pins)} snapshots pinned, {len(counts)} to be read")
