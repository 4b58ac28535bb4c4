"""Moving KV blocks between the pool and a slower tier (host memory, a file): feature ``swap``.

The contract for such a tier. As with blocks, ids are the scheduler's and storage is the executor's:
``BackendExecutor.num_swap_slots`` places of one block each, ids 0 .. num_swap_slots - 1.

Nothing asks for swaps yet: preemption recomputes, whatever the executor offers. Recompute stays the
answer when the executor has no places, when all are taken, and after a swap that failed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockSwaps:
    """Moves between two steps. All of ``out`` happen before any of ``back``, so a block whose
    content leaves may be filled again by the same call; within each list the order is free, since
    no target occurs twice."""

    out: tuple[tuple[int, int], ...] = ()
    """(block, swap slot): keep the block's content in the slot. The block may be reused at once."""
    back: tuple[tuple[int, int], ...] = ()
    """(swap slot, block): restore. The slot keeps its content until it is written again."""
