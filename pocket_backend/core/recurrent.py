"""Scheduling of models that keep a recurrent state per slot (feature ``recurrent_state``).

A state cannot be cut back, copied between slots, or kept through a step that failed. So:

- a sequence starts at a snapshot: of the longest cached prefix that has one, or at position 0;
- chunks end where a snapshot is wanted: at the last block boundary of a prompt, where another
  prompt branched off or is waiting to, and about every ``state_snapshot_interval`` tokens;
- choices of n > 1 are admitted through the prefix cache, where the first has left a snapshot;
- after a failed step its sequences start again, each from its best snapshot.

docs/scheduling.md says why.
"""

from __future__ import annotations

from collections.abc import Iterable

from pocket_backend.core.asking import Ask, execute_request
from pocket_backend.core.config import SchedulerConfig
from pocket_backend.core.lifecycle import Lifecycle
from pocket_backend.core.prefix_wait import PrefixWait
from pocket_backend.core.request import ScheduledRequest
from pocket_backend.core.sharing import BudgetSharing, Shares
from pocket_backend.core.step import ExecuteRequest, MemoryInfo
from pocket_backend.kv.manager import SequenceBlocks
from pocket_backend.kv.recurrent import RecurrentBlockManager

DEFAULT_INTERVAL = 512
"""Tokens between two snapshots of a sequence when the executor does not say."""


class RecurrentLifecycle(Lifecycle):
    """``Lifecycle`` over a ``RecurrentBlockManager``."""

    blocks: RecurrentBlockManager

    def _make_blocks(self, memory: MemoryInfo, config: SchedulerConfig) -> RecurrentBlockManager:
        return RecurrentBlockManager(
            memory.num_blocks,
            memory.block_size,
            num_snapshots=memory.num_state_snapshots,
            enable_prefix_cache=config.enable_prefix_cache,
            eviction=config.eviction,
        )

    def _make_prefix_wait(self, memory: MemoryInfo, config: SchedulerConfig) -> PrefixWait:
        return _SnapshotWait(memory.block_size, config.prefix_wait_steps, self.blocks)

    def start(
        self, sequence: ScheduledRequest, table: SequenceBlocks, computed: int, now: float
    ) -> None:
        super().start(sequence, table, computed, now)
        self._want_end_of_prompt(sequence)

    def suspect(self, sequences: Iterable[ScheduledRequest]) -> None:
        """As ``Lifecycle.suspect``, but each from its best snapshot: its state is lost."""
        failed = list(sequences)
        blocks = self.blocks
        for sequence in failed:
            assert sequence.blocks is not None
            blocks.free(sequence.blocks)
        for sequence in failed:
            known = len(sequence.tokens)
            match = blocks.match(sequence.namespace, sequence.tokens, known)
            table = blocks.allocate(match, sequence.tokens, known)
            if table is None:  # it had shared blocks that it would have to compute for itself
                self.preempt(sequence)
                continue
            # The executor is to forget the old table: its blocks may be another's by now.
            self.slots_to_reset.append(sequence.slot_id)
            table.owner = sequence
            sequence.blocks = table
            sequence.redo_until = max(sequence.redo_until, sequence.num_computed_tokens)
            sequence.num_computed_tokens = match.num_tokens
            sequence.is_new = True
            sequence.num_sent_blocks = 0
            self.suspects[sequence] = None
            self._want_end_of_prompt(sequence)

    def _want_end_of_prompt(self, sequence: ScheduledRequest) -> None:
        # Before the last token, which is always computed: for the next turn of a conversation, the
        # same prompt again, and the other choices of n > 1.
        assert sequence.blocks is not None
        size = self.blocks.block_size
        last = (sequence.num_prompt_tokens - 1) // size * size
        if last > sequence.num_computed_tokens:
            self.blocks.want_snapshot(sequence.blocks, last)


class _SnapshotWait(PrefixWait):
    """``PrefixWait`` whose writers save their state where the held-back prompt branches off."""

    __slots__ = ("_blocks",)

    def __init__(self, block_size: int, max_steps: int, blocks: RecurrentBlockManager) -> None:
        super().__init__(block_size, max_steps)
        self._blocks = blocks

    def hold(self, sequence: ScheduledRequest, writer: SequenceBlocks, matched: int) -> None:
        super().hold(sequence, writer, matched)
        self._blocks.want_snapshot(writer, sequence.wait_blocks * self._block_size)


class RecurrentSharing(BudgetSharing):
    """``BudgetSharing`` that ends chunks where a snapshot is wanted."""

    def __init__(
        self, memory: MemoryInfo, config: SchedulerConfig, life: RecurrentLifecycle
    ) -> None:
        super().__init__(memory, config, life)
        self._blocks = life.blocks
        self._interval = memory.state_snapshot_interval or DEFAULT_INTERVAL

    def share(self, now: float, step: int) -> Shares:
        return [
            (sequence, self._cut(sequence, count)) for sequence, count in super().share(now, step)
        ]

    def _cut(self, sequence: ScheduledRequest, count: int) -> int:
        assert sequence.blocks is not None
        begin = sequence.num_computed_tokens
        end = self._blocks.plan_snapshot(sequence.blocks, begin, begin + count, self._interval)
        return count if end is None else end - begin


def asks_with_states(blocks: RecurrentBlockManager) -> Ask:
    """``execute_request`` with the snapshots to start from and to write."""

    def ask(sequence: ScheduledRequest, count: int, block_size: int) -> ExecuteRequest:
        request = execute_request(sequence, count, block_size)
        assert sequence.blocks is not None
        if request.is_new:
            request.state_source = blocks.starts(sequence.blocks)
        request.state_target = blocks.target_of(sequence.blocks)
        return request

    return ask
