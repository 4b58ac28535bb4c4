"""Ids and reference counts of KV blocks."""

from __future__ import annotations

from pocket_backend.api.errors import EngineError

FREE = -1
"""Reference count of a block on the free list; 0 is a block that only the prefix cache keeps."""


class IntegrityError(EngineError):
    """Block accounting is wrong: a bug in this project, never a client's fault."""


class BlockPool:
    """``num_blocks`` ids, each free, held by references, or at zero references and not yet free.

    All operations are O(1) per block. The free list is a stack: the block that was written last is
    reused first, while it is still in the CPU's caches. Not thread-safe; the scheduler owns it.
    """

    __slots__ = ("_free", "num_blocks", "refs")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: got {num_blocks}; must be at least 1")
        self.num_blocks = num_blocks
        self.refs: list[int] = [FREE] * num_blocks
        """Read-only for others; indexed by block id."""
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free block, now with one reference. Raises IntegrityError when there is none."""
        if not self._free:
            raise IntegrityError("no free KV block: the caller must check or evict first")
        block = self._free.pop()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block that is held or kept by the prefix cache."""
        if self.refs[block] == FREE:
            raise IntegrityError(f"KV block {block} is free and cannot be shared")
        self.refs[block] += 1

    def drop(self, block: int) -> int:
        """Remove a reference; returns how many are left. At 0 the caller keeps or frees it."""
        left = self.refs[block] - 1
        if left < 0:
            raise IntegrityError(f"KV block {block} released more often than it was taken")
        self.refs[block] = left
        return left

    def give_back(self, block: int) -> None:
        """Put a block without references on the free list."""
        if self.refs[block] != 0:
            raise IntegrityError(
                f"KV block {block} freed with {self.refs[block]} references (-1: already free)"
            )
        self.refs[block] = FREE
        self._free.append(block)

    def check(self) -> None:
        """Raise IntegrityError unless the free list and the counts agree. O(num_blocks)."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a KV block is on the free list twice")
        for block, refs in enumerate(self.refs):
            if (refs == FREE) != (block in free):
                raise IntegrityError(f"KV block {block}: {refs} references, free={block in free}")
