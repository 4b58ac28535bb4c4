"""Holding a request back while a running one computes the prefix that both share.

Sixteen requests with one new prefix would otherwise compute it sixteen times in the same steps.
The wait ends when the shared blocks are cached, when the writer stops (finished, preempted,
cancelled), or when the request has been held for its total number of steps; then it is queued again
with its old rank. So nobody waits longer than that bound for anybody's prefix.
"""

from __future__ import annotations

from collections.abc import Iterator

from pocket_backend.core.request import ScheduledRequest
from pocket_backend.kv.manager import SequenceBlocks


class PrefixWait:
    """The held-back sequences, oldest first. One check per sequence and step, O(1) each."""

    __slots__ = ("_block_size", "_held", "_max_steps")

    def __init__(self, block_size: int, max_steps: int) -> None:
        self._block_size = block_size
        self._max_steps = max_steps
        self._held: dict[ScheduledRequest, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._held)

    def __contains__(self, sequence: ScheduledRequest) -> bool:
        return sequence in self._held

    def may_wait(self, sequence: ScheduledRequest) -> bool:
        return sequence.waited_steps < self._max_steps

    def worthwhile(self, sequence: ScheduledRequest, matched: int) -> bool:
        """Whether a whole block that the sequence would not have to compute is missing."""
        return (matched + 1) * self._block_size < len(sequence.tokens)

    def hold(self, sequence: ScheduledRequest, writer: SequenceBlocks, matched: int) -> None:
        """``writer`` is computing the block after the ``matched`` ones. O(shared tokens), once."""
        other = writer.owner
        assert isinstance(other, ScheduledRequest)
        size = self._block_size
        mine, theirs = sequence.tokens, other.tokens
        # Never the block of the last token, which has to be computed anyway.
        last = min((len(mine) - 1) // size, len(theirs) // size)
        shared = matched + 1
        while (
            shared < last
            and mine[shared * size : (shared + 1) * size]
            == theirs[shared * size : (shared + 1) * size]
        ):
            shared += 1
        sequence.wait_for = writer
        sequence.wait_blocks = shared
        self._held[sequence] = None

    def discard(self, sequence: ScheduledRequest) -> None:
        self._held.pop(sequence, None)
        sequence.wait_for = None

    def wake(self) -> list[ScheduledRequest]:
        """Remove and return those whose wait is over; call once per step."""
        ready: list[ScheduledRequest] = []
        for sequence in self._held:
            writer = sequence.wait_for
            assert writer is not None
            sequence.waited_steps += 1
            if (
                writer.num_cached >= sequence.wait_blocks
                or not writer.caching
                or sequence.waited_steps >= self._max_steps
            ):
                ready.append(sequence)
        for sequence in ready:
            self.discard(sequence)
        return ready
