"""Which KV blocks the sequence in each slot has: the executor's side of ``ExecuteRequest``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pocket_backend.api import EngineError
from pocket_backend.api.errors import short_repr

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pocket_backend.core.step import ExecuteRequest, MemoryInfo

NO_BLOCK = -1


class SlotTables:
    """Block tables by slot, kept in one array. Engine thread only."""

    def __init__(self, memory: MemoryInfo) -> None:
        self._memory = memory
        per_slot = -(-memory.max_context // memory.block_size)
        self.blocks = np.full((memory.max_slots, per_slot), NO_BLOCK, dtype=np.int64)
        """[slots, blocks of a full context]; ``NO_BLOCK`` behind a sequence's last block."""
        self._owners: list[str | None] = [None] * memory.max_slots
        self._counts = [0] * memory.max_slots

    def check(self, requests: Sequence[ExecuteRequest]) -> None:
        """What the step relies on.

        Raises:
            EngineError: slots are repeated or out of range, or tokens exceed budget or context.
        """
        memory = self._memory
        slots = {request.slot_id for request in requests}
        if len(slots) != len(requests) or min(slots) < 0 or max(slots) >= memory.max_slots:
            raise EngineError(
                f"slots {short_repr(sorted(r.slot_id for r in requests))} are repeated or not "
                f"from 0 to {memory.max_slots - 1}"
            )
        tokens = sum([len(request.token_ids) for request in requests])
        if tokens > memory.max_batch_tokens:
            raise EngineError(
                f"step of {tokens} tokens; at most {memory.max_batch_tokens} are allowed"
            )
        for request in requests:
            end = request.start_position + len(request.token_ids)
            if not request.token_ids or request.start_position < 0 or end > memory.max_context:
                raise EngineError(
                    f"request {request.request_id!r}: {len(request.token_ids)} tokens from "
                    f"position {request.start_position} do not fit the context of "
                    f"{memory.max_context}"
                )

    def advance(self, request: ExecuteRequest) -> Sequence[int]:
        """Take in the request's blocks; returns those that hold nothing computed yet.

        Raises:
            EngineError: the slot holds another sequence, an id is out of range, or the tokens reach
                beyond the table.
        """
        slot, memory = request.slot_id, self._memory
        if request.is_new:
            self.reset(slot)
            self._owners[slot] = request.request_id
        elif self._owners[slot] != request.request_id:
            raise EngineError(f"slot {slot} does not hold request {request.request_id!r}")
        begin = self._counts[slot]
        if request.block_ids:
            self._append(slot, request.block_ids)
        end = request.start_position + len(request.token_ids)
        if end > self._counts[slot] * memory.block_size:
            raise EngineError(
                f"request {request.request_id!r}: position {end - 1} is beyond its "
                f"{self._counts[slot]} blocks"
            )
        computed = -(-request.start_position // memory.block_size)
        return request.block_ids[max(0, computed - begin) :]

    def count(self, slot: int) -> int:
        """Blocks of the sequence in the slot."""
        return self._counts[slot]

    def reset(self, slot: int) -> None:
        """Forget the slot's sequence.

        Raises:
            EngineError: no such slot.
        """
        if not 0 <= slot < len(self._owners):
            raise EngineError(f"slot_id: got {slot}; must be below {len(self._owners)}")
        self.blocks[slot, : self._counts[slot]] = NO_BLOCK
        self._counts[slot] = 0
        self._owners[slot] = None

    def padded(self, slots: NDArray[np.int64], first: NDArray[np.int64], width: int) -> NDArray[
        np.int64
    ]:  # fmt: skip
        """[slots, width] block ids from block ``first`` of each table on. Places behind a table's
        end repeat its first block: an id that may be read, of the sequence itself."""
        columns = first[:, None] + np.arange(width)
        inside = np.minimum(columns, self.blocks.shape[1] - 1)
        found = self.blocks[slots[:, None], inside]
        missing = (columns >= self.blocks.shape[1]) | (found == NO_BLOCK)
        return np.where(missing, self.blocks[slots, :1], found)

    def places(self, slot: int, begin: int, end: int) -> NDArray[np.int64]:
        """Where positions ``begin .. end - 1`` are stored: block * block size + offset."""
        size = self._memory.block_size
        positions = np.arange(begin, end)
        found: NDArray[np.int64] = self.blocks[slot, positions // size] * size + positions % size
        return found

    def _append(self, slot: int, blocks: Sequence[int]) -> None:
        memory, begin = self._memory, self._counts[slot]
        end = begin + len(blocks)
        if end > self.blocks.shape[1]:
            raise EngineError(
                f"slot {slot}: {end} blocks; a context of {memory.max_context} tokens has "
                f"{self.blocks.shape[1]}"
            )
        if min(blocks) < 0 or max(blocks) >= memory.num_blocks:
            raise EngineError(
                f"slot {slot}: block ids {short_repr(list(blocks))} are not from 0 to "
                f"{memory.num_blocks - 1}"
            )
        self.blocks[slot, begin:end] = blocks
        self._counts[slot] = end
