"""The naive model of the block manager that the property tests compare it with.

It knows no tree: a dictionary from (namespace, whole prefix) to block id, and a list of tables. It
predicts every hit and, for LRU, every eviction.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pocket_backend.kv import BlockManager, Namespace, SequenceBlocks

KV_SETTINGS = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)


class SameHash(bytes):
    """S6: every key collides with every other."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return bytes(self) == bytes(other) if isinstance(other, bytes) else NotImplemented


@dataclass(eq=False)
class LiveSequence:
    blocks: SequenceBlocks
    namespace: Namespace
    tokens: array[int]
    computed: int


Prefix = tuple[Namespace, tuple[int, ...]]


class ManagerMachine(RuleBasedStateMachine):
    """A block manager against the flat model; ``collide`` makes all keys hash alike."""

    collide = False

    @initialize(seed=st.integers(0, 2**20))
    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        self.size = rng.randint(1, 4)
        self.manager = BlockManager(
            rng.randint(3, 24),
            self.size,
            eviction=rng.choice(["lru", "lru", "lfu", "fifo"]),
            block_key=SameHash if self.collide else None,
        )
        self.lru = self.manager._idle._rank.__name__ == "lru"
        self.live: list[LiveSequence] = []
        self.cached: dict[Prefix, int] = {}
        self.released: dict[int, int] = {}
        """Block id -> when its last table was given up."""
        self.clock = 0

    # -- the model ----------------------------------------------------------------------------

    def used(self) -> set[int]:
        return {block for s in self.live for block in s.blocks.block_ids}

    def in_use(self, block: int) -> bool:
        return block in self.used()

    def model_match(self, namespace: Namespace, tokens: array[int]) -> list[int]:
        path: list[int] = []
        while (len(path) + 1) * self.size < len(tokens):
            block = self.cached.get((namespace, tuple(tokens[: (len(path) + 1) * self.size])))
            if block is None:
                break
            path.append(block)
        return path

    def model_forget_evicted(self, evicted: int, used: set[int]) -> None:
        """Remove the ``evicted`` next victims from the model, as LRU with leaves first would."""
        for _ in range(evicted):
            idle = [(p, b) for p, b in self.cached.items() if b not in used]
            leaves = [
                (p, b)
                for p, b in idle
                if not any(
                    q[0] == p[0] and len(q[1]) > len(p[1]) and q[1][: len(p[1])] == p[1]
                    for q in self.cached
                )
            ]
            prefix, _ = min(leaves, key=lambda e: (self.released[e[1]], -len(e[0][1])))
            del self.cached[prefix]

    def resync(self) -> None:
        """For other policies: whatever was evicted, trust the tree (its own check covers it)."""
        nodes = {node.block for node in self.manager._cache.nodes()}
        self.cached = {p: b for p, b in self.cached.items() if b in nodes}

    def after_taking(self, evicted_before: int, used: set[int]) -> None:
        """``used``: blocks that could not be evicted (victims are in tables again by now)."""
        evicted = self.manager.num_evicted - evicted_before
        if self.lru:
            self.model_forget_evicted(evicted, used)
        else:
            self.resync()

    # -- rules --------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**20), reserve=st.integers(0, 3))
    def admit(self, seed: int, reserve: int) -> None:
        rng = random.Random(seed)
        namespace = rng.choice([Namespace(), Namespace(salt="x"), Namespace(adapter="x")])
        stem = [rng.choice([1, 2])] * rng.randint(0, 10)
        tokens = array("i", stem + [rng.randrange(3) for _ in range(rng.randint(1, 5))])
        before = self.manager.usage()
        evicted = self.manager.num_evicted
        match = self.manager.match(namespace, tokens, len(tokens))
        path = self.model_match(namespace, tokens)
        assert [node.block for node in match.path] == path
        assert match.num_tokens == len(path) * self.size < len(tokens)
        new = -(-len(tokens) // self.size) - len(path)
        cost = new + sum(not self.in_use(block) for block in path)
        assert self.manager.cost(match, len(tokens)) == cost
        used = self.used() | set(path)
        blocks = self.manager.allocate(match, tokens, len(tokens), reserve=reserve)
        if before.total - before.in_use - cost < reserve:
            assert blocks is None
            assert self.manager.usage() == before
            return
        assert blocks is not None
        assert blocks.block_ids[: len(path)] == path
        self.live.append(LiveSequence(blocks, namespace, tokens, match.num_tokens))
        self.after_taking(evicted, used)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20), count=st.integers(1, 8))
    def compute(self, which: int, count: int) -> None:
        """Compute up to ``count`` known tokens and commit; the model follows."""
        sequence = self.live[which % len(self.live)]
        blocks = sequence.blocks
        sequence.computed = min(len(sequence.tokens), sequence.computed + count)
        index, caching = blocks.num_cached, blocks.caching
        expected = index
        while caching and (index + 1) * self.size <= sequence.computed:
            prefix = (sequence.namespace, tuple(sequence.tokens[: (index + 1) * self.size]))
            present = self.cached.get(prefix)
            if present is not None and self.in_use(present):
                caching = False
                break
            self.cached[prefix] = blocks.block_ids[index]
            index += 1
            expected = index
        self.manager.commit(blocks, sequence.tokens, sequence.computed)
        assert (blocks.num_cached, blocks.caching) == (expected, caching)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20), token=st.integers(0, 2), times=st.integers(1, 6))
    def append(self, which: int, token: int, times: int) -> None:
        sequence = self.live[which % len(self.live)]
        for _ in range(times):
            before, used = self.manager.usage(), self.used()
            evicted = self.manager.num_evicted
            needs = len(sequence.tokens) + 1 > len(sequence.blocks.block_ids) * self.size
            grown = self.manager.grow(sequence.blocks, len(sequence.tokens) + 1)
            assert grown == (not needs or before.in_use < before.total)
            if not grown:
                assert self.manager.usage() == before
                return
            self.after_taking(evicted, used)
            sequence.tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20), back=st.integers(0, 6))
    def fork(self, which: int, back: int) -> None:
        parent = self.live[which % len(self.live)]
        length = parent.computed - back
        if length < 1 or not self.manager.num_available:
            return
        evicted, used = self.manager.num_evicted, self.used()
        blocks, copies = self.manager.fork(parent.blocks, length)
        full = length // self.size
        assert blocks.block_ids[:full] == parent.blocks.block_ids[:full]
        if length % self.size:
            assert copies == ((parent.blocks.block_ids[full], blocks.block_ids[full]),)
            assert not self.in_use(blocks.block_ids[full])
        else:
            assert copies == ()
        self.live.append(LiveSequence(blocks, parent.namespace, parent.tokens[:length], length))
        self.after_taking(evicted, used)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 20))
    def free(self, which: int) -> None:
        sequence = self.live.pop(which % len(self.live))
        self.clock += 1
        for block in sequence.blocks.block_ids:
            self.released[block] = self.clock
        self.manager.free(sequence.blocks)
        usage = self.manager.usage()
        self.manager.free(sequence.blocks)
        assert self.manager.usage() == usage

    @rule()
    def clear(self) -> None:
        idle = sum(not self.in_use(block) for block in self.cached.values())
        if idle > 6:
            return
        assert self.manager.clear_cache() == idle
        self.cached = {p: b for p, b in self.cached.items() if self.in_use(b)}

    # -- after each ---------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        usage = self.manager.usage()
        used = self.used()
        idle = set(self.cached.values()) - used
        assert usage.in_use == len(used)
        assert usage.cached_only == len(idle)
        assert usage.free + usage.in_use + usage.cached_only == usage.total
        self.manager.check_integrity([s.blocks for s in self.live])

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for sequence in self.live:
            self.manager.free(sequence.blocks)
        self.manager.clear_cache()
        assert self.manager.usage().free == self.manager.num_blocks
        assert not self.manager._cache.roots, "an empty namespace is kept"
