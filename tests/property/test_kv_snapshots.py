"""``RecurrentBlockManager`` against the flat model of ``kv_model`` and a list of prefixes.

The model of snapshots is a dictionary (namespace, whole prefix) in order of last use, and what was
last written to each id. It predicts every match, every stop, every snapshot given up for another,
and that a snapshot always holds the state of exactly the prefix that it is found by.
"""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from kv_model import KV_SETTINGS, LiveSequence, ManagerMachine, Prefix
from recurrent_oracle import node_state

from pocket_backend.kv import (
    IntegrityError,
    Namespace,
    RecurrentBlockManager,
    SequenceBlocks,
    SnapshotPool,
)


class SnapshotMachine(ManagerMachine):
    @initialize(seed=st.integers(0, 2**20))
    def start(self, seed: int) -> None:
        super().start(seed=seed)
        rng = random.Random(seed)
        self.total = rng.choice([0, 1, 1, 2, 3, 30])
        self.interval = rng.choice([1, 4, 9, 100])
        self.manager: RecurrentBlockManager = RecurrentBlockManager(
            self.manager.num_blocks,
            self.size,
            num_snapshots=self.total,
            eviction=rng.choice(["lru", "lru", "lfu", "fifo"]),
        )
        self.lru = self.manager._idle._rank.__name__ == "lru"
        self.kept: dict[Prefix, None] = {}
        """Least recently used first."""
        self.content: dict[int, Prefix] = {}
        """Snapshot id -> what was last written to it."""
        self.reading: dict[LiveSequence, Prefix] = {}
        """Admitted, and not started yet."""
        self.stops: dict[LiveSequence, set[int]] = {}
        self.saved_at: dict[LiveSequence, int] = {}
        self.hits = self.replaced = 0

    # -- the model ----------------------------------------------------------------------------

    def model_cached(self, namespace: Namespace, tokens: array[int]) -> list[int]:
        return super().model_match(namespace, tokens)

    def model_match(self, namespace: Namespace, tokens: array[int]) -> list[int]:
        path = self.model_cached(namespace, tokens)
        while path and (namespace, tuple(tokens[: len(path) * self.size])) not in self.kept:
            path.pop()
        return path

    def touch(self, prefix: Prefix) -> None:
        self.kept.pop(prefix, None)
        self.kept[prefix] = None

    def model_take(self) -> bool:
        """Whether an id can be had, the oldest that nobody is to read given up for it."""
        if len(self.kept) < self.total:
            return True
        victim = next((p for p in self.kept if p not in self.reading.values()), None)
        if victim is not None:
            del self.kept[victim]
            self.replaced += 1
        return victim is not None

    def model_stop(self, sequence: LiveSequence, begin: int, end: int) -> int | None:
        inside = [stop for stop in self.stops[sequence] if begin < stop <= end]
        if inside:
            return min(inside)
        boundary = end // self.size * self.size
        far = boundary - self.saved_at[sequence] >= self.interval
        return boundary if boundary > begin and far else None

    # -- rules --------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**20), reserve=st.integers(0, 3))
    def admit(self, seed: int, reserve: int) -> None:
        before = len(self.live)
        cached = dict(self.cached)
        super().admit(seed=seed, reserve=reserve)
        if len(self.live) == before:
            return
        sequence = self.live[-1]
        namespace, tokens = sequence.namespace, sequence.tokens
        now, self.cached = self.cached, cached
        whole = len(self.model_cached(namespace, tokens)) * self.size
        self.cached = now
        if sequence.computed:
            prefix = (namespace, tuple(tokens[: sequence.computed]))
            self.reading[sequence] = prefix
            self.touch(prefix)
        self.stops[sequence] = {whole} if whole > sequence.computed else set()
        self.saved_at[sequence] = sequence.computed

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20), block=st.integers(0, 9))
    def want(self, which: int, block: int) -> None:
        sequence = self.live[which % len(self.live)]
        self.manager.want_snapshot(sequence.blocks, block * self.size)
        self.stops[sequence].add(block * self.size)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20), count=st.integers(1, 8))
    def compute(self, which: int, count: int) -> None:
        """A step of one sequence: planned, sent, computed, entered into the tree."""
        sequence = self.live[which % len(self.live)]
        blocks, begin = sequence.blocks, sequence.computed
        end = min(len(sequence.tokens), begin + count)
        if end == begin:
            return
        count = self.plan(sequence, begin, end) - begin
        target = self.manager.target_of(blocks)
        source = self.manager.starts(blocks)
        prefix = self.reading.pop(sequence, None)
        assert (source is None) == (prefix is None)
        assert source is None or self.content[source] == prefix
        assert self.manager.starts(blocks) is None
        self.hits += source is not None
        done = (sequence.namespace, tuple(sequence.tokens[: begin + count]))
        if target is not None:
            self.content[target] = done
        super().compute(which=which, count=count)
        assert self.manager.target_of(blocks) is None
        if target is not None and done in self.cached:
            self.touch(done)
            self.saved_at[sequence] = begin + count

    def plan(self, sequence: LiveSequence, begin: int, end: int) -> int:
        wanted = self.model_stop(sequence, begin, end) if self.total else None
        reading = self.reading.get(sequence)
        if wanted is not None:
            self.reading.pop(sequence, None)  # read before anything is written
            wanted = wanted if self.model_take() else None
        got = self.manager.plan_snapshot(sequence.blocks, begin, end, self.interval)
        assert got == wanted
        assert (self.manager.target_of(sequence.blocks) is None) == (wanted is None)
        if reading is not None:
            self.reading[sequence] = reading
        return end if got is None else got

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20), count=st.integers(1, 8))
    def fail(self, which: int, count: int) -> None:
        """A step that is planned, and whose sequence ends before it is taken in."""
        sequence = self.live[which % len(self.live)]
        begin = sequence.computed
        end = min(len(sequence.tokens), begin + count)
        if end > begin:
            self.plan(sequence, begin, end)
            self.hits += self.manager.starts(sequence.blocks) is not None
        self.free(which=which)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20))
    def free(self, which: int) -> None:
        sequence = self.live[which % len(self.live)]
        super().free(which=which)
        self.reading.pop(sequence, None)

    def fork(self) -> None:
        """Not a rule here."""

    # -- after each ---------------------------------------------------------------------------

    @invariant()
    def snapshots_agree(self) -> None:
        self.kept = {prefix: None for prefix in self.kept if prefix in self.cached}
        pool = self.manager.snapshots
        assert [node_state(node) for node in pool._kept] == list(self.kept)
        for node, snapshot in pool._kept.items():
            assert self.content[snapshot] == node_state(node)
        assert len(self.kept) + len(pool._free) == self.total
        usage = self.manager.snapshot_usage()
        assert (usage.free, usage.saved, usage.total) == (
            len(pool._free),
            len(self.kept),
            self.total,
        )
        assert usage.free + usage.writing + usage.saved == usage.total
        assert (usage.hits, usage.replaced) == (self.hits, self.replaced)
        assert usage.saves == usage.saved + usage.replaced + usage.dropped

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        super().teardown()
        assert len(self.manager.snapshots._free) == self.total


TestSnapshots = SnapshotMachine.TestCase
TestSnapshots.settings = KV_SETTINGS


def test_a_lost_snapshot_is_reported() -> None:
    pool = SnapshotPool(2)
    taken = pool.take()
    assert taken is not None
    pool.check([taken], [])
    with pytest.raises(IntegrityError, match="not each of 2 once"):
        pool.check([], [])
    with pytest.raises(ValueError, match="num_snapshots"):
        SnapshotPool(-1)


def test_a_snapshot_is_not_given_up_before_it_is_read() -> None:
    manager = RecurrentBlockManager(16, 2, num_snapshots=1)
    tokens, others = array("i", [1, 2, 3]), array("i", [5, 6, 7])

    def admit(known: array[int]) -> SequenceBlocks:
        blocks = manager.allocate(manager.match(Namespace(), known, 3), known, 3)
        assert blocks is not None
        return blocks

    def save(blocks: SequenceBlocks, known: array[int]) -> int | None:
        end = manager.plan_snapshot(blocks, 0, 2, 1)
        manager.starts(blocks)
        manager.commit(blocks, known, 2)
        return end

    first = admit(tokens)
    assert save(first, tokens) == 2
    reader, writer = admit(tokens), admit(others)
    assert save(writer, others) is None
    assert manager.starts(reader) == 0
    manager.free(writer)
    writer = admit(others)
    assert save(writer, others) == 2  # the reader has started
    manager.check_integrity([first, reader, writer])
