"""Who computes how many tokens in a step, and which waiting requests may start.

Steps 2 to 5 of the order of decisions that ``scheduler`` lists.
"""

from __future__ import annotations

import math

from pocket_backend.core.config import SchedulerConfig
from pocket_backend.core.lifecycle import Lifecycle
from pocket_backend.core.request import RequestStatus, ScheduledRequest
from pocket_backend.core.step import MemoryInfo

_RUNNING = RequestStatus.RUNNING
_NO_LIMIT = 2**31

_BLOCKED_RETRY_STEPS = 16
"""A request that did not fit is looked up again when enough blocks are available, and at least this
often in case others have cached more of its prefix meanwhile."""

Shares = list[tuple[ScheduledRequest, int]]
"""Sequences of a step and how many tokens each computes."""


class BudgetSharing:
    """Divides the token budget of each step; admits, and lets ``Lifecycle`` preempt.

    Belongs to one scheduler, which owns ``life`` too.
    """

    def __init__(self, memory: MemoryInfo, config: SchedulerConfig, life: Lifecycle) -> None:
        self._config = config
        self._life = life
        self._block_size = memory.block_size
        self._budget = min(memory.max_batch_tokens, config.max_batch_tokens or _NO_LIMIT)
        self.max_running = min(memory.max_slots, config.max_running or _NO_LIMIT, self._budget)
        """Never more sequences than tokens in a step: every decode is in every step."""
        self.queried_tokens = self.hit_tokens = 0
        """Tokens looked up in the prefix cache and found there, at first admissions only."""
        self._watermark = math.ceil(config.watermark * memory.num_blocks)
        self._step = 0
        self._blocked: ScheduledRequest | None = None
        self._blocked_until = (0, 0)

    def share(self, now: float, step: int) -> Shares:
        """The sequences of step number ``step``, at ``now``; tables are grown and slots given.

        While a failed step's culprit is looked for, one suspect alone.
        """
        self._step = step
        if self._life.suspects and (alone := self._share_one_suspect()):
            return alone
        return self._share_budget(now)

    def _share_budget(self, now: float) -> Shares:
        block_size, life = self._block_size, self._life
        preemptions = life.preemptions
        decodes: Shares = []
        prefills: list[ScheduledRequest] = []
        for sequence in list(life.running):
            if sequence.status is not _RUNNING:
                continue  # preempted for one before it
            computed = sequence.num_computed_tokens
            if len(sequence.tokens) - computed > 1:
                prefills.append(sequence)
            elif computed % block_size or life.grow(sequence):
                decodes.append((sequence, 1))
        admitting = life.preemptions == preemptions
        if not admitting:
            decodes = [share for share in decodes if share[0].status is _RUNNING]
            prefills = [sequence for sequence in prefills if sequence.status is _RUNNING]
        left = self._budget - len(decodes)
        if not (prefills or (admitting and left > 0 and self._can_admit())):
            return decodes  # most steps
        if len(prefills) > 1:
            # The highest ranked makes steady progress; of the others the shortest goes first, so
            # a newcomer is not behind several long prompts.
            head = min(prefills, key=lambda s: s.order)
            prefills.sort(key=lambda s: (s is not head, _remaining(s), s.order))
        chunks: Shares = []
        for index, sequence in enumerate(prefills):
            if left <= 0:
                break
            more = index + 1 < len(prefills) or (admitting and self._can_admit())
            count = self._chunk(sequence, left, more=more)
            chunks.append((sequence, count))
            left -= count
        while admitting and left > 0 and self._can_admit():
            candidate = life.queue.peek()
            assert candidate is not None
            admitted = self._admit(candidate, now)
            if admitted is None:
                break
            if admitted:
                count = self._chunk(candidate, left, more=self._can_admit())
                chunks.append((candidate, count))
                left -= count
        for index, (sequence, count) in enumerate(chunks):
            if left <= 0:
                break
            extra = min(left, _remaining(sequence) - count)
            chunks[index] = (sequence, count + extra)
            left -= extra
        return decodes + chunks

    def _chunk(self, sequence: ScheduledRequest, left: int, *, more: bool) -> int:
        """How many of the ``left`` tokens the sequence takes; ``more``: others have work, too.

        What ends in this step may take all: it is out of the way in the next one.
        """
        remaining = _remaining(sequence)
        if remaining <= left or not more:
            return min(remaining, left)
        return max(1, left - math.ceil(left * self._config.reserved_share))

    def _share_one_suspect(self) -> Shares:
        life = self._life
        while life.suspects:
            sequence = next(iter(life.suspects))
            if life.grow(sequence):
                return [(sequence, min(_remaining(sequence), self._budget))]
        return []

    def _can_admit(self) -> bool:
        # A held-back request keeps its place: its turn has come, only its prefix is not there yet.
        life = self._life
        return len(life.queue) > 0 and len(life.running) + len(life.held) < self.max_running

    def _admit(self, sequence: ScheduledRequest, now: float) -> bool | None:
        """Start the queue's next sequence. False: held back; None: not enough blocks."""
        life, blocks = self._life, self._life.blocks
        # So that each running sequence can take one more block before memory gets short again;
        # waived when nothing runs, or a request as large as the pool would wait for ever.
        reserve = max(self._watermark, len(life.running)) if life.running else 0
        if self._is_blocked(sequence, reserve):
            return None
        parent = self._fork_parent(sequence)
        if parent is not None:
            assert parent.blocks is not None
            # One block whether the prompt's last token starts a block or continues a copied one.
            computed = sequence.num_prompt_tokens - 1
            table, sequence.pending_copies = blocks.fork(parent.blocks, computed)
            blocks.grow(table, computed + 1)
            life.start(sequence, table, computed, now)
            return True
        known = len(sequence.tokens)
        match = blocks.match(sequence.namespace, sequence.tokens, known)
        if life.held.may_wait(sequence):
            writer = blocks.writer_of(match, sequence.tokens)
            if writer is not None and life.held.worthwhile(sequence, len(match.path)):
                life.hold(sequence, writer, len(match.path))
                return False
        allocated = blocks.allocate(match, sequence.tokens, known, reserve=reserve)
        if allocated is None:
            self._blocked = sequence
            needed = blocks.cost(match, known) + reserve
            self._blocked_until = (needed, self._step + _BLOCKED_RETRY_STEPS)
            return None
        self._blocked = None
        if not sequence.admitted:
            self.queried_tokens += known
            self.hit_tokens += match.num_tokens
        life.start(sequence, allocated, match.num_tokens, now)
        return True

    def _is_blocked(self, sequence: ScheduledRequest, reserve: int) -> bool:
        """A cheap answer for a request that did not fit before, without a look-up."""
        available = self._life.blocks.num_available
        if available <= reserve:
            return True
        if self._blocked is not sequence or not self._life.running:
            return False
        needed, retry_step = self._blocked_until
        return available < needed and self._step < retry_step

    def _fork_parent(self, sequence: ScheduledRequest) -> ScheduledRequest | None:
        """The first sequence of the group, if ``sequence`` can start from its blocks."""
        group = sequence.group
        if not sequence.choice_index or group is None or not self._config.block_copies:
            return None
        parent, prompt = group.sequences[0], sequence.num_prompt_tokens
        computed = parent.status is _RUNNING and parent.num_computed_tokens >= prompt
        return parent if computed and len(sequence.tokens) == prompt else None


def _remaining(sequence: ScheduledRequest) -> int:
    return len(sequence.tokens) - sequence.num_computed_tokens
