"""The block manager: the only way from the scheduler to KV block ids.

Every block is in exactly one of three states, and their counts always add up to the pool's size:

- *free*: on the pool's free list;
- *in use*: in the table of at least one sequence (and possibly in the prefix tree);
- *cached only*: in the prefix tree and in no table; given up when memory is needed.

Rules that make this safe:

- A block enters the tree only after every token in it was computed (``commit``).
- A sequence that holds a block of the tree holds the whole path above it, so a cached-only block
  never has an in-use descendant: all cached-only blocks can be evicted, leaves first.
- A block that is still to be written is in no other table and not in the tree; ``fork`` copies a
  partly filled block instead of sharing it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from pocket_backend.kv.eviction import POLICIES, EvictionQueue
from pocket_backend.kv.pool import FREE, BlockPool, IntegrityError
from pocket_backend.kv.radix import BlockKey, CacheNode, Namespace, RadixPrefixCache, Root
from pocket_backend.kv.snapshots import SnapshotUsage


@dataclass(frozen=True, slots=True)
class BlockUsage:
    """Blocks by state; the three add up to ``total``."""

    free: int
    in_use: int
    cached_only: int
    total: int


class SequenceBlocks:
    """One sequence's block table. Made and changed by ``BlockManager`` only; others read."""

    __slots__ = ("_pending", "block_ids", "caching", "node", "num_cached", "owner", "root")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.num_cached = 0
        """Leading blocks of the table that are in the tree."""
        self.node: CacheNode | None = None
        """Tree node of the last of them, or the namespace's root."""
        self.root: Root | None = None
        self.caching = False
        """Whether blocks that get full are still entered into the tree."""
        self.owner: object = None
        """For the scheduler: whose table it is."""
        self._pending: tuple[CacheNode, bytes] | None = None

    @property
    def released(self) -> bool:
        return not self.block_ids


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What ``match`` found. Valid only until the manager's next change (``allocate`` checks)."""

    namespace: Namespace
    path: tuple[CacheNode, ...]
    num_tokens: int
    epoch: int


class BlockManager:
    """Match, allocate, grow, commit, fork and free. Not thread-safe; the scheduler owns it.

    Costs: ``grow``, ``commit`` and ``free`` are O(1) per block, ``match`` O(matched tokens),
    eviction O(log cached blocks) per block.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        eviction: str = "lru",
        block_key: BlockKey | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: got {block_size}; must be at least 1")
        if eviction not in POLICIES:
            raise ValueError(f"eviction: got {eviction!r}; must be one of {', '.join(POLICIES)}")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.enable_prefix_cache = enable_prefix_cache
        self.num_evicted = 0
        """Cached blocks given up since the start."""
        self._pool = BlockPool(num_blocks)
        self._cache = RadixPrefixCache(num_blocks, block_size, block_key)
        self._idle = EvictionQueue(POLICIES[eviction])
        self._num_cached_only = 0
        self._epoch = 0
        self._writers: dict[tuple[CacheNode, bytes], SequenceBlocks] = {}
        """(end of a cached path, next block's key) -> who is computing that block."""

    # -- state --------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be had at once: free ones and cached-only ones."""
        return self._pool.num_free + self._num_cached_only

    @property
    def epoch(self) -> int:
        """Changes whenever an earlier ``match`` may no longer hold."""
        return self._epoch

    def usage(self) -> BlockUsage:
        free, cached = self._pool.num_free, self._num_cached_only
        return BlockUsage(free, self.num_blocks - free - cached, cached, self.num_blocks)

    def snapshot_usage(self) -> SnapshotUsage:
        """Of models that keep a recurrent state; nothing here."""
        return SnapshotUsage()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- admission ----------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: array[int], num_tokens: int) -> PrefixMatch:
        """Look up the cached prefix of ``tokens[:num_tokens]``; never the last of these tokens,
        since a sequence needs the logits of at least one. Changes nothing."""
        path: list[CacheNode] = []
        if self.enable_prefix_cache:
            path = self._cache.match(namespace, tokens, (num_tokens - 1) // self.block_size)
        return PrefixMatch(namespace, tuple(path), len(path) * self.block_size, self._epoch)

    def writer_of(self, match: PrefixMatch, tokens: array[int]) -> SequenceBlocks | None:
        """The sequence that is about to compute the block after ``match``, if there is one."""
        if not self._writers:
            return None
        node = match.path[-1] if match.path else self._cache.roots.get(match.namespace)
        if node is None:
            return None
        return self._writers.get((node, self._cache.key(tokens, len(match.path))))

    def allocate(
        self, match: PrefixMatch, tokens: array[int], num_tokens: int, *, reserve: int = 0
    ) -> SequenceBlocks | None:
        """Take the matched blocks and new ones for the rest of ``tokens[:num_tokens]``.

        Returns None, and changes nothing, if fewer than ``reserve`` blocks would stay available.

        Raises:
            IntegrityError: ``match`` is older than the manager's last change.
        """
        if match.epoch != self._epoch:
            raise IntegrityError("stale prefix match: look the prefix up in the same step")
        refs = self._pool.refs
        path = match.path
        if self.num_available - self.cost(match, num_tokens) < reserve:
            return None
        self._epoch += 1
        blocks = SequenceBlocks()
        for node in path:
            if refs[node.block] == 0:
                self._num_cached_only -= 1
                self._idle.discard(node)
            node.hits += 1
            self._pool.share(node.block)
            blocks.block_ids.append(node.block)
        if self.enable_prefix_cache:
            blocks.root = self._cache.acquire_root(match.namespace)
            blocks.node = path[-1] if path else blocks.root
            blocks.num_cached = len(path)
            blocks.caching = True
        self._take(blocks.block_ids, self.blocks_for(num_tokens) - len(path))
        self._announce(blocks, tokens, num_tokens)
        return blocks

    def cost(self, match: PrefixMatch, num_tokens: int) -> int:
        """Available blocks that ``allocate`` would use up."""
        refs = self._pool.refs
        revived = sum(refs[node.block] == 0 for node in match.path)
        return self.blocks_for(num_tokens) - len(match.path) + revived

    # -- life of a sequence -------------------------------------------------------------------

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens; False (and no change) if there are not enough."""
        needed = self.blocks_for(num_tokens) - len(blocks.block_ids)
        if needed <= 0:
            return True
        if needed > self.num_available:
            return False
        self._epoch += 1
        self._take(blocks.block_ids, needed)
        return True

    def commit(self, blocks: SequenceBlocks, tokens: array[int], num_computed: int) -> None:
        """Enter the blocks that ``tokens[:num_computed]`` fill completely into the tree."""
        if not blocks.caching:
            return
        full = num_computed // self.block_size
        if full <= blocks.num_cached:
            return
        self._epoch += 1
        self._withdraw(blocks)
        refs = self._pool.refs
        node = blocks.node
        assert node is not None
        for index in range(blocks.num_cached, full):
            key = self._cache.key(tokens, index)
            block = blocks.block_ids[index]
            present = node.children.get(key)
            if present is None:
                node = self._cache.insert(node, key, block)
            elif refs[present.block] == 0:
                # Same content in an idle block (a prompt that was cached to its last token). Ours
                # takes its place, so that we hold the whole path that we insert below.
                self._idle.discard(present)
                self._pool.give_back(self._cache.replace_block(present, block))
                self._num_cached_only -= 1
                node = present
            else:
                # Another running sequence holds the same content. Inserting below its block, which
                # we do not hold, could leave an in-use block under an idle one.
                blocks.caching = False
                break
            blocks.num_cached = index + 1
        blocks.node = node
        self._announce(blocks, tokens, len(tokens))

    def fork(
        self, parent: SequenceBlocks, num_tokens: int
    ) -> tuple[SequenceBlocks, tuple[tuple[int, int], ...]]:
        """A second table over the parent's first ``num_tokens`` computed tokens.

        Full blocks are shared; a partly filled last one is replaced by a new block and returned as
        a copy (from, to) that the executor makes before it computes.

        Raises:
            IntegrityError: no block is available for the copy (check ``num_available``).
        """
        shared, partial = divmod(num_tokens, self.block_size)
        self._epoch += 1
        child = SequenceBlocks()
        for block in parent.block_ids[:shared]:
            self._pool.share(block)
            child.block_ids.append(block)
        copies: tuple[tuple[int, int], ...] = ()
        if partial:
            self._take(child.block_ids, 1)
            copies = ((parent.block_ids[shared], child.block_ids[shared]),)
        if parent.root is not None:
            child.root = self._cache.acquire_root(parent.root.namespace)
            node = parent.node
            for _ in range(parent.num_cached - shared):
                assert node is not None
                node = node.parent
            child.node = node
            child.num_cached = min(parent.num_cached, shared)
            child.caching = child.num_cached == shared
        return child, copies

    def free(self, blocks: SequenceBlocks) -> None:
        """Give the table up; calling it again does nothing.

        Blocks in the tree stay cached; only the last becomes a candidate for eviction at once.
        """
        if not blocks.block_ids and blocks.root is None:
            return
        self._epoch += 1
        self._withdraw(blocks)
        node_of = self._cache.node_of
        now = self._cache.tick()
        for block in blocks.block_ids:
            node = node_of[block]
            if self._pool.drop(block):
                continue
            if node is None:
                self._pool.give_back(block)
                continue
            node.last_used = now
            self._num_cached_only += 1
            if not node.children:
                self._idle.push(node)
        blocks.block_ids = []
        blocks.caching = False
        blocks.node = None
        if blocks.root is not None:
            self._cache.release_root(blocks.root)
            blocks.root = None

    def clear_cache(self) -> int:
        """Free every cached-only block (new weights, say); returns how many."""
        count = self._num_cached_only
        self._evict(count)
        return count

    # -- checks -------------------------------------------------------------------------------

    def check_integrity(self, live: Iterable[SequenceBlocks]) -> None:
        """Compare all bookkeeping with the tables of the ``live`` sequences. O(blocks).

        Raises:
            IntegrityError: says what does not add up.
        """
        expected = [0] * self.num_blocks
        writers = 0
        for blocks in live:
            if blocks._pending is not None:
                writers += self._writers.get(blocks._pending) is blocks
            for block in blocks.block_ids:
                expected[block] += 1
            path = blocks.num_cached
            node = blocks.node
            while path and node is not None:
                if node.block != blocks.block_ids[path - 1]:
                    raise IntegrityError(f"table and tree disagree on block {node.block}")
                node, path = node.parent, path - 1
        if writers != len(self._writers):
            raise IntegrityError(f"{len(self._writers)} writers recorded, {writers} alive")
        self._pool.check()
        cached_only = idle_leaves = nodes = 0
        for node in self._cache.nodes():
            nodes += 1
            if self._cache.node_of[node.block] is not node:
                raise IntegrityError(f"KV block {node.block} is in the tree twice")
            if expected[node.block]:
                parent = node.parent
                if parent is not None and parent.parent is not None and not expected[parent.block]:
                    raise IntegrityError(f"in-use block {node.block} below an idle one")
            else:
                cached_only += 1
                idle_leaves += not node.children
        for block, count in enumerate(expected):
            refs = self._pool.refs[block]
            in_tree = self._cache.node_of[block] is not None
            if refs != count and not (refs == FREE and count == 0 and not in_tree):
                raise IntegrityError(f"KV block {block}: {refs} references, {count} tables")
            if refs == 0 and not in_tree:
                raise IntegrityError(f"KV block {block} leaked: no table, no tree, not free")
        if (cached_only, idle_leaves, nodes) != (
            self._num_cached_only,
            len(self._idle),
            self._cache.num_nodes,
        ):
            raise IntegrityError(
                f"counted {cached_only} cached-only blocks, {idle_leaves} idle leaves, {nodes} "
                f"nodes; recorded {self._num_cached_only}, {len(self._idle)}, "
                f"{self._cache.num_nodes}"
            )

    # -- internals ----------------------------------------------------------------------------

    def _take(self, into: list[int], count: int) -> None:
        short = count - self._pool.num_free
        if short > 0:
            self._evict(short)
        into.extend(self._pool.take() for _ in range(count))

    def _evict(self, count: int) -> None:
        refs = self._pool.refs
        for _ in range(count):
            node = self._idle.pop()
            if node is None:
                raise IntegrityError("cached-only blocks are counted that cannot be found")
            parent = self._cache.remove(node)
            self._pool.give_back(node.block)
            self._num_cached_only -= 1
            self.num_evicted += 1
            if parent is not None and not parent.children and refs[parent.block] == 0:
                self._idle.push(parent)

    def _announce(self, blocks: SequenceBlocks, tokens: array[int], num_tokens: int) -> None:
        """Let others find that ``blocks`` is computing its next whole block of known tokens."""
        if not blocks.caching or (blocks.num_cached + 1) * self.block_size > num_tokens:
            return
        assert blocks.node is not None
        slot = (blocks.node, self._cache.key(tokens, blocks.num_cached))
        if slot not in self._writers:
            self._writers[slot] = blocks
            blocks._pending = slot

    def _withdraw(self, blocks: SequenceBlocks) -> None:
        if blocks._pending is not None:
            del self._writers[blocks._pending]
            blocks._pending = None
