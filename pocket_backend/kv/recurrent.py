"""The block manager of models that keep a recurrent state beside their KV blocks.

A state cannot be cut back to an earlier position, so a cached path is of use only up to a node
whose state was saved: matches end at the last node with a snapshot. Everything else about blocks is
as in ``BlockManager``. Models without such state never come here.

Nobody forks: a running sequence's state at an earlier position is gone.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from pocket_backend.kv.manager import BlockManager, PrefixMatch, SequenceBlocks
from pocket_backend.kv.pool import IntegrityError
from pocket_backend.kv.radix import BlockKey, CacheNode, Namespace, RadixPrefixCache
from pocket_backend.kv.snapshots import SnapshotPool, SnapshotUsage


@dataclass(frozen=True, slots=True)
class RecurrentMatch(PrefixMatch):
    """``path`` ends at a node with a snapshot; ``cached`` is the whole cached path."""

    cached: tuple[CacheNode, ...] = ()


@dataclass(slots=True)
class TableState:
    """What the manager knows of the recurrent state that belongs to a table."""

    source: int | None = None
    """Snapshot that the slot starts from; None: zero, or already sent to the executor."""
    reading: CacheNode | None = None
    """The node of ``source`` while it must not be given up."""
    target: int | None = None
    """Snapshot that the step in flight writes, at a block boundary."""
    saved_at: int = 0
    """Position of the last snapshot that was saved or loaded."""
    stops: list[int] = field(default_factory=list)
    """Block boundaries, ascending, where a snapshot is wanted."""


class _PrefixCache(RadixPrefixCache):
    """A prefix tree whose nodes take their snapshots with them."""

    __slots__ = ("snapshots",)

    def __init__(self, num_blocks: int, block_size: int, block_key: BlockKey | None, count: int):
        super().__init__(num_blocks, block_size, block_key)
        self.snapshots = SnapshotPool(count)

    def remove(self, node: CacheNode) -> CacheNode | None:
        self.snapshots.drop(node)
        return super().remove(node)


class RecurrentBlockManager(BlockManager):
    """``BlockManager`` with ``num_snapshots`` places for states.

    With none of them nothing can be resumed from, so no prefix is cached.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_snapshots: int,
        enable_prefix_cache: bool = True,
        eviction: str = "lru",
        block_key: BlockKey | None = None,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            enable_prefix_cache=enable_prefix_cache and num_snapshots > 0,
            eviction=eviction,
            block_key=block_key,
        )
        self._cache: _PrefixCache = _PrefixCache(num_blocks, block_size, block_key, num_snapshots)
        self.snapshots = self._cache.snapshots
        self._states: dict[SequenceBlocks, TableState] = {}
        self._starts = 0
        """Sequences sent to the executor with a snapshot to start from."""

    def snapshot_usage(self) -> SnapshotUsage:
        return self.snapshots.usage(self._starts)

    # -- admission ----------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: array[int], num_tokens: int) -> RecurrentMatch:
        """As ``BlockManager.match``, up to the last node that has a snapshot."""
        found = super().match(namespace, tokens, num_tokens)
        count = len(found.path)
        while count and self.snapshots.of(found.path[count - 1]) is None:
            count -= 1
        return RecurrentMatch(
            namespace, found.path[:count], count * self.block_size, found.epoch, found.path
        )

    def writer_of(self, match: PrefixMatch, tokens: array[int]) -> SequenceBlocks | None:
        """Who is about to compute the block after the cached path, if that spares ``tokens`` a
        whole block: only then does a snapshot of the writer help."""
        assert isinstance(match, RecurrentMatch)
        if (len(match.cached) + 1) * self.block_size >= len(tokens):
            return None
        whole = PrefixMatch(match.namespace, match.cached, match.num_tokens, match.epoch)
        return super().writer_of(whole, tokens)

    def allocate(
        self, match: PrefixMatch, tokens: array[int], num_tokens: int, *, reserve: int = 0
    ) -> SequenceBlocks | None:
        """As ``BlockManager.allocate``. The match's snapshot stays until ``starts``; where the path
        goes on without snapshots, one is wanted: others have come this way, and more will."""
        assert isinstance(match, RecurrentMatch)
        blocks = super().allocate(match, tokens, num_tokens, reserve=reserve)
        if blocks is None:
            return None
        state = self._states[blocks] = TableState(saved_at=match.num_tokens)
        if match.path:
            state.reading = match.path[-1]
            state.source = self.snapshots.pin(state.reading)
        if len(match.cached) > len(match.path):
            state.stops.append(len(match.cached) * self.block_size)
        return blocks

    # -- states -------------------------------------------------------------------------------

    def want_snapshot(self, blocks: SequenceBlocks, position: int) -> None:
        """Ask for a snapshot when the table's sequence gets to ``position``, a block boundary."""
        stops = self._states[blocks].stops
        if position > 0 and position not in stops:
            insort(stops, position)

    def plan_snapshot(
        self, blocks: SequenceBlocks, begin: int, end: int, interval: int
    ) -> int | None:
        """The next step computes tokens ``begin .. end - 1``: reserve a snapshot if one is wanted.

        Wanted are the stops, and the last boundary up to ``end`` when ``interval`` tokens have gone
        by without one. Returns the position that the step has to end at for it, or None: any.
        """
        if blocks.root is None:
            return None  # nothing is cached, so nobody would find it
        state = self._states[blocks]
        stops = state.stops
        while stops and stops[0] <= begin:
            del stops[0]
        if stops and stops[0] <= end:
            position = stops[0]
        else:
            position = end - end % self.block_size
            if position <= begin or position - state.saved_at < interval:
                return None
        if state.reading is not None:
            # Executors read all sources of a step before they write a target.
            self._stop_reading(state)
        state.target = self.snapshots.take()
        return None if state.target is None else position

    def starts(self, blocks: SequenceBlocks) -> int | None:
        """The table goes to the executor: the snapshot to start from, asked for once."""
        state = self._states[blocks]
        if state.reading is not None:
            self._stop_reading(state)
        source, state.source = state.source, None
        self._starts += source is not None
        return source

    def target_of(self, blocks: SequenceBlocks) -> int | None:
        """The snapshot that the next step of the table's sequence writes."""
        return self._states[blocks].target

    def commit(self, blocks: SequenceBlocks, tokens: array[int], num_computed: int) -> None:
        """As ``BlockManager.commit``; a snapshot that the step has written is kept."""
        super().commit(blocks, tokens, num_computed)
        state = self._states[blocks]
        snapshot, state.target = state.target, None
        if snapshot is None:
            return
        node = self._node_at(blocks, tokens, num_computed // self.block_size)
        if node is None:
            self.snapshots.give_back(snapshot)
        else:
            self.snapshots.keep(node, snapshot)
            state.saved_at = num_computed

    def free(self, blocks: SequenceBlocks) -> None:
        """As ``BlockManager.free``; a snapshot in flight is free again."""
        state = self._states.pop(blocks, None)
        if state is not None:
            if state.reading is not None:
                self._stop_reading(state)
            if state.target is not None:
                self.snapshots.give_back(state.target)
        super().free(blocks)

    # -- checks and internals -----------------------------------------------------------------

    def check_integrity(self, live: Iterable[SequenceBlocks]) -> None:
        """As ``BlockManager.check_integrity``, and every snapshot id is in exactly one place."""
        tables = list(live)
        super().check_integrity(tables)
        if set(tables) != set(self._states):
            raise IntegrityError(f"{len(tables)} tables, {len(self._states)} with a state")
        states = self._states.values()
        self.snapshots.check(
            [state.target for state in states if state.target is not None],
            [state.reading for state in states if state.reading is not None],
        )
        nodes = set(self._cache.nodes())
        kept = sum(self.snapshots.of(node) is not None for node in nodes)
        if kept != self.snapshots.num_kept:
            raise IntegrityError(f"{self.snapshots.num_kept} snapshots kept, {kept} in the tree")

    def _node_at(self, blocks: SequenceBlocks, tokens: array[int], depth: int) -> CacheNode | None:
        """The node after the sequence's first ``depth`` blocks, its own or another's."""
        if blocks.num_cached == depth:
            return blocks.node
        if blocks.root is None:
            return None
        # Others hold the same content in their blocks: the state after it is the same.
        path = self._cache.match(blocks.root.namespace, tokens, depth)
        return path[-1] if len(path) == depth else None

    def _stop_reading(self, state: TableState) -> None:
        assert state.reading is not None
        self.snapshots.unpin(state.reading)
        state.reading = None
