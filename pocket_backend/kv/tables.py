"""Block tables for executors: rows of one preallocated int32 array.

The scheduler sends deltas (``ExecuteRequest.block_ids``); this is the other end. The array supports
the buffer protocol, so native code reads ``data`` in place, without conversion.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pocket_backend.kv.pool import IntegrityError


class BlockTables:
    """``max_slots`` rows of ``max_blocks`` block ids, int32, row-major, and each row's length.

    Not thread-safe: owned by the executor, which changes rows between steps only.
    """

    __slots__ = ("data", "lengths", "max_blocks", "max_slots")

    def __init__(self, max_slots: int, max_blocks: int) -> None:
        self.max_slots = max_slots
        self.max_blocks = max_blocks
        self.data: array[int] = array("i", bytes(4 * max_slots * max_blocks))
        self.lengths: array[int] = array("i", bytes(4 * max_slots))

    def apply(self, slot_id: int, block_ids: Sequence[int], *, is_new: bool) -> None:
        """Replace (``is_new``) or extend the slot's row. O(len(block_ids)).

        Raises:
            IntegrityError: no such slot, or the row would be longer than ``max_blocks``.
        """
        if not 0 <= slot_id < self.max_slots:
            raise IntegrityError(f"slot {slot_id}: must be from 0 to {self.max_slots - 1}")
        begin = 0 if is_new else self.lengths[slot_id]
        end = begin + len(block_ids)
        if end > self.max_blocks:
            raise IntegrityError(f"slot {slot_id}: {end} blocks in a row of {self.max_blocks}")
        row = slot_id * self.max_blocks
        self.data[row + begin : row + end] = array("i", block_ids)
        self.lengths[slot_id] = end

    def reset(self, slot_id: int) -> None:
        """Forget the slot's row."""
        self.lengths[slot_id] = 0

    def row(self, slot_id: int) -> array[int]:
        """A copy of the slot's block ids, in order of position."""
        begin = slot_id * self.max_blocks
        return self.data[begin : begin + self.lengths[slot_id]]
