"""ContinuousBatchScheduler: which tokens of which sequences the next step computes.

docs/scheduling.md explains the policy; this is its order of decisions in one step:

1. expire deadlines; wake requests whose shared prefix has been computed;
2. every running sequence that needs one token gets it, growing its table, preempting the lowest
   ranked if memory is short;
3. unfinished prompts share the rest of the budget, the highest ranked first; one that cannot end in
   this step takes at most ``1 - reserved_share`` of what is left while others have work;
4. waiting requests are admitted in policy order while slots, blocks and budget last (none in a step
   that preempted);
5. what is still left goes to the chunks of 3 and 4.

A pure data structure: no threads, no clock (``now`` is seconds on any monotonic scale), no tensors,
no logging. Cost per step: O(sequences and new blocks in the step); contexts are never walked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from pocket_backend.api.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineError,
    OverloadedError,
)
from pocket_backend.api.types import GenerationRequest
from pocket_backend.core.admission import check_request, token_limit
from pocket_backend.core.config import SchedulerConfig
from pocket_backend.core.deadlines import DeadlineQueue
from pocket_backend.core.lifecycle import Lifecycle
from pocket_backend.core.plan import SchedulerStats, SequenceUpdate, StepPlan
from pocket_backend.core.request import NO_TOKENS_STOP, RequestStatus, ScheduledRequest
from pocket_backend.core.step import ExecuteOutput, ExecuteRequest, MemoryInfo

_RUNNING = RequestStatus.RUNNING
_FINISHED = RequestStatus.FINISHED
_COMPAT_BLOCK = 16
_COMPAT_BUDGET = 512
_NO_LIMIT = 2**31

_BLOCKED_RETRY_STEPS = 16
"""A request that did not fit is looked up again when enough blocks are available, and at least this
often in case others have cached more of its prefix meanwhile."""

_Shares = list[tuple[ScheduledRequest, int]]
"""Sequences of a step and how many tokens each computes."""


class ContinuousBatchScheduler:
    """Owns all requests, slots and (through ``BlockManager``) KV block ids.

    One plan is in flight at a time: ``schedule`` -> execute -> ``update`` (or ``fail_step``).
    ``add_request``, ``cancel`` and ``finish`` may come at any point between, from the same thread.

    Args:
        memory: sizes of the executor; or give the older ``max_batch_size`` and
            ``max_total_tokens`` (capacity of the KV pool in tokens) instead.
        config: policy; ``enable_prefix_cache`` (older) is read only without it.
        eos_token_ids: tokens that end a sequence unless it says ``ignore_eos``.

    Raises:
        ConfigurationError: neither form was given.
    """

    def __init__(
        self,
        memory: MemoryInfo | None = None,
        config: SchedulerConfig | None = None,
        *,
        eos_token_ids: Iterable[int] = (),
        max_batch_size: int | None = None,
        max_total_tokens: int | None = None,
        enable_prefix_cache: bool = True,
    ) -> None:
        if memory is None:
            memory = _memory_from_limits(max_batch_size, max_total_tokens)
        if config is None:
            config = SchedulerConfig(enable_prefix_cache=enable_prefix_cache)
        self.memory = memory
        self.config = config
        self._eos = frozenset(eos_token_ids)
        self._budget = min(memory.max_batch_tokens, config.max_batch_tokens or _NO_LIMIT)
        # Never more sequences than tokens in a step: every decode is in every step.
        self._max_running = min(memory.max_slots, config.max_running or _NO_LIMIT, self._budget)
        self._watermark = math.ceil(config.watermark * memory.num_blocks)
        self._life = Lifecycle(memory, config, self._eos, token_limit(memory))
        self._deadlines = DeadlineQueue()
        self._in_flight: StepPlan | None = None
        self._last_now = 0.0
        self._blocked: ScheduledRequest | None = None
        self._blocked_until = (0, 0)
        self._steps = self._stalled = 0
        self._computed = self._recomputed = self._queried = self._hits = 0

    # -- requests in and out ------------------------------------------------------------------

    def add_request(
        self, request: GenerationRequest | ScheduledRequest, now: float | None = None
    ) -> ScheduledRequest:
        """Queue a request; returns the state of its first sequence.

        ``now`` is the arrival (seconds); without it a ``ScheduledRequest``'s own ``arrival_time``.

        Raises:
            InvalidRequestError: it could never run (the message has the numbers), or its id is in
                use.
            OverloadedError: the queue is full.
        """
        first = (
            request
            if isinstance(request, ScheduledRequest)
            else ScheduledRequest.from_generation(request)
        )
        check_request(first, self.memory)
        life = self._life
        waiting = len(life.queue) + len(life.held)
        startable = max(0, self._max_running - len(life.running))
        if waiting >= self.config.max_queue + startable:
            raise OverloadedError(
                f"{waiting} requests are waiting (max_queue {self.config.max_queue}); retry later"
            )
        now = self._advance(first.arrival_time if now is None else now)
        group = life.accept(first, now)
        deadline = first.deadline_seconds
        if deadline is None:
            deadline = self.config.default_deadline_seconds
        self._deadlines.add(group, now, deadline, self.config.queue_timeout_seconds)
        return first

    def cancel(self, request_id: str) -> bool:
        """End all sequences of the request, whatever their state; False if it is not known.

        Slots and blocks are free at once. Output of a step in flight is ignored.
        """
        return self._end_request(request_id, "cancelled")

    def finish(self, request_id: str, reason: str = "stop", choice_index: int = 0) -> bool:
        """End one sequence for a reason found outside (a stop string); False if it has ended."""
        group = self._life.groups.get(request_id)
        if group is None or not 0 <= choice_index < len(group.sequences):
            return False
        sequence = group.sequences[choice_index]
        if sequence.status is _FINISHED:
            return False
        self._life.end(sequence, reason)
        return True

    def has_work(self) -> bool:
        """Whether ``schedule`` may have something to return."""
        return bool(self._life.groups or self._life.slots_to_reset)

    # -- a step -------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to run or to report.

        Raises:
            EngineError: the last plan has been neither updated nor failed.
        """
        if self._in_flight is not None:
            raise EngineError("schedule: the last plan needs update() or fail_step() first")
        now = self._advance(now)
        life = self._life
        expired = self._expire(now)
        life.wake_held()
        preemptions, admissions = life.preemptions, life.admissions
        shares = self._share_one_suspect() or self._share_budget(now)
        self._stalled = 0 if shares or not life.groups else self._stalled + 1
        if not shares and not expired and not life.slots_to_reset:
            return None
        size = self.memory.block_size
        requests = tuple([_execute_request(sequence, count, size) for sequence, count in shares])
        total = sum([count for _, count in shares])
        plan = StepPlan(
            requests=requests,
            sequences=tuple([sequence for sequence, _ in shares]),
            reset_slots=tuple(life.slots_to_reset),
            finished=expired,
            num_tokens=total,
            num_prefill_tokens=total - sum([not r.is_prefill for r in requests]),
            num_admitted=life.admissions - admissions,
            num_preempted=life.preemptions - preemptions,
        )
        life.slots_to_reset.clear()
        if requests:
            self._in_flight = plan
            self._steps += 1
        return plan

    def update(
        self, plan: StepPlan, outputs: Sequence[ExecuteOutput], now: float
    ) -> tuple[SequenceUpdate, ...]:
        """Take in the outputs of ``plan``: advance counters, enter full blocks into the prefix
        cache, end sequences at their last token.

        Sequences that were cancelled or finished meanwhile, and chunks that sampled nothing, give
        no update.

        Raises:
            EngineError: not the plan in flight, or outputs that do not belong to it. Nothing has
                changed then; call ``fail_step``.
        """
        self._check_in_flight(plan)
        if len(outputs) != len(plan.requests):
            raise EngineError(
                f"the executor returned {len(outputs)} outputs for {len(plan.requests)} requests"
            )
        if [r.request_id for r in plan.requests] != [o.request_id for o in outputs]:
            raise EngineError("the executor returned outputs in another order")
        self._in_flight = None
        now = self._advance(now)
        updates: list[SequenceUpdate] = []
        life, block_size = self._life, self.memory.block_size
        for asked, sequence, output in zip(plan.requests, plan.sequences, outputs, strict=True):
            if sequence.status is not _RUNNING:
                continue
            token = output.token_id
            if output.finish_reason == "error" or (token is None and asked.samples):
                error = EngineError(output.error or "the executor returned no token")
                updates.append(self._fail(sequence, error))
                continue
            count = len(asked.token_ids)
            begin = sequence.num_computed_tokens
            end = begin + count
            tokens = sequence.tokens
            sequence.num_computed_tokens = end
            if begin < sequence.redo_until:
                self._recomputed += min(end, sequence.redo_until) - begin
            if end % block_size < count:  # a block boundary was reached or crossed
                assert sequence.blocks is not None
                life.blocks.commit(sequence.blocks, tokens, end)
            if asked.is_new:
                sequence.pending_copies = ()
            if token is None or not asked.samples:
                continue
            tokens.append(token)
            if sequence.first_token_time is None:
                sequence.first_token_time = now
                if sequence.group is not None and sequence.group.unborn:
                    life.give_birth(sequence.group)
            update = SequenceUpdate(sequence, (token,), output.logprobs)
            updates.append(update)
            length = len(tokens)
            if token in sequence.stop_ids and length >= sequence.min_length:
                if token not in self._eos or sequence.sampling_params.ignore_eos:
                    update.stop_reason = token
                update.finish_reason = "stop"
                update.request_done = life.end(sequence, "stop")
            elif length >= sequence.end_length:
                update.finish_reason = "length"
                update.request_done = life.end(sequence, "length")
        self._computed += plan.num_tokens
        if life.suspects:
            for sequence in plan.sequences:
                life.suspects.pop(sequence, None)
        return tuple(updates)

    def fail_step(
        self, plan: StepPlan, error: Exception | None = None
    ) -> tuple[SequenceUpdate, ...]:
        """``execute_model`` raised for ``plan``: nothing that it computed counts.

        A step of one sequence fails that sequence. A step of several fails none yet: they run again
        one at a time, with their whole block tables, until the one that raises is found.

        Returns the sequences that have failed.
        """
        self._check_in_flight(plan)
        self._in_flight = None
        alive = [s for s in plan.sequences if s.status is _RUNNING]
        if len(plan.sequences) == 1:
            return tuple([self._fail(s, error or EngineError("the step failed")) for s in alive])
        for sequence in alive:
            if sequence.pending_copies:
                # The copy's source may be gone by the next step: start again.
                self._life.preempt(sequence)
            else:
                self._life.suspects[sequence] = None
                sequence.is_new = True
                sequence.num_sent_blocks = 0
        return ()

    # -- older names --------------------------------------------------------------------------

    def schedule_step(
        self, outputs: Sequence[ExecuteOutput] = (), now: float | None = None
    ) -> tuple[tuple[ExecuteRequest, ...], tuple[ExecuteRequest, ...]]:
        """The older call: (prefill batch, decode batch) of the next step.

        ``outputs`` are those of the batches returned last time, in any order. Without ``now`` the
        time of the last call is used, so deadlines do not pass.

        Raises:
            EngineError: an output of the last step is missing.
        """
        now = self._last_now if now is None else now
        plan = self._in_flight
        if plan is not None:
            by_id = {output.request_id: output for output in outputs}
            missing = [r.request_id for r in plan.requests if r.request_id not in by_id]
            if missing:
                raise EngineError(f"schedule_step: no output for {', '.join(missing[:8])}")
            self.update(plan, [by_id[r.request_id] for r in plan.requests], now)
        step = self.schedule(now)
        requests = step.requests if step is not None else ()
        return (
            tuple([r for r in requests if r.is_prefill]),
            tuple([r for r in requests if not r.is_prefill]),
        )

    def complete_request(self, request_id: str) -> None:
        """The older call: end the request, whatever its state; harmless if it has ended."""
        self._end_request(request_id, "stop")

    # -- what others look at ------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """A snapshot; O(1)."""
        life = self._life
        return SchedulerStats(
            running=len(life.running),
            waiting=life.num_waiting,
            held_back=len(life.held),
            free_slots=len(life.free_slots),
            blocks=life.blocks.usage(),
            steps=self._steps,
            admissions=life.admissions,
            preemptions=life.preemptions,
            finished=MappingProxyType(dict(life.finished)),
            computed_tokens=self._computed,
            recomputed_tokens=self._recomputed,
            prefix_query_tokens=self._queried,
            prefix_hit_tokens=self._hits,
            evicted_blocks=life.blocks.num_evicted,
            stalled_schedules=self._stalled,
        )

    def check_integrity(self) -> None:
        """Verify slots, states and every KV block. O(pool); meant for idle times and tests.

        Raises:
            IntegrityError: says what does not add up.
        """
        self._life.check_integrity()

    def clear_prefix_cache(self) -> int:
        """Forget every cached prefix that no sequence uses; returns how many blocks that freed."""
        return self._life.blocks.clear_cache()

    # -- deciding -----------------------------------------------------------------------------

    def _share_budget(self, now: float) -> _Shares:
        block_size, life = self.memory.block_size, self._life
        preemptions = life.preemptions
        decodes: _Shares = []
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
        if len(prefills) > 1:
            # The highest ranked makes steady progress; of the others the shortest goes first, so
            # a newcomer is not behind several long prompts.
            head = min(prefills, key=lambda s: s.order)
            prefills.sort(key=lambda s: (s is not head, _remaining(s), s.order))
        chunks: _Shares = []
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
        return max(1, left - math.ceil(left * self.config.reserved_share))

    def _share_one_suspect(self) -> _Shares:
        life = self._life
        while life.suspects:
            sequence = next(iter(life.suspects))
            if life.grow(sequence):
                return [(sequence, min(_remaining(sequence), self._budget))]
        return []

    def _can_admit(self) -> bool:
        # A held-back request keeps its place: its turn has come, only its prefix is not there yet.
        life = self._life
        return len(life.queue) > 0 and len(life.running) + len(life.held) < self._max_running

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
            self._blocked_until = (needed, self._steps + _BLOCKED_RETRY_STEPS)
            return None
        self._blocked = None
        if not sequence.admitted:
            self._queried += known
            self._hits += match.num_tokens
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
        return available < needed and self._steps < retry_step

    def _fork_parent(self, sequence: ScheduledRequest) -> ScheduledRequest | None:
        """The first sequence of the group, if ``sequence`` can start from its blocks."""
        group = sequence.group
        if not sequence.choice_index or group is None or not self.config.block_copies:
            return None
        parent, prompt = group.sequences[0], sequence.num_prompt_tokens
        computed = parent.status is _RUNNING and parent.num_computed_tokens >= prompt
        return parent if computed and len(sequence.tokens) == prompt else None

    # -- ending -------------------------------------------------------------------------------

    def _end_request(self, request_id: str, reason: str) -> bool:
        group = self._life.groups.get(request_id)
        if group is None:
            return False
        self._life.end_group(group, reason)
        return True

    def _fail(self, sequence: ScheduledRequest, error: Exception) -> SequenceUpdate:
        done = self._life.end(sequence, "error")
        return SequenceUpdate(sequence, finish_reason="error", error=error, request_done=done)

    def _expire(self, now: float) -> tuple[SequenceUpdate, ...]:
        updates: list[SequenceUpdate] = []
        while (expired := self._deadlines.pop_expired(now)) is not None:
            group, message = expired
            for sequence in self._life.end_group(group, "error"):
                error = DeadlineExceededError(message)
                updates.append(SequenceUpdate(sequence, finish_reason="error", error=error))
            updates[-1].request_done = True
        return tuple(updates)

    def _check_in_flight(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise EngineError("this plan is not in flight: each is updated or failed exactly once")

    def _advance(self, now: float) -> float:
        # Time never goes back for us, so arrival times stay in order of arrival.
        self._last_now = max(self._last_now, now)
        return self._last_now


def _remaining(sequence: ScheduledRequest) -> int:
    return len(sequence.tokens) - sequence.num_computed_tokens


def _execute_request(sequence: ScheduledRequest, count: int, block_size: int) -> ExecuteRequest:
    # Arguments are positional, in the order of the fields: this runs per sequence and step.
    begin = sequence.num_computed_tokens
    tokens = sequence.tokens
    known = len(tokens)
    output_index = known - sequence.num_prompt_tokens
    newest_only = begin == known - 1
    if newest_only and output_index and begin % block_size and not sequence.is_new:
        # The common case: inside a block that the executor knows.
        return ExecuteRequest(
            sequence.sequence_id,
            (tokens[begin],),
            sequence.slot_id,
            False,
            sequence.sampling_params,
            None,
            begin,
            False,
            (),
            True,
            output_index,
            sequence.seed,
        )
    table = sequence.blocks
    assert table is not None
    is_new = sequence.is_new
    block_ids = tuple(table.block_ids[sequence.num_sent_blocks :])
    sequence.num_sent_blocks = len(table.block_ids)
    sequence.is_new = False
    params = sequence.sampling_params
    return ExecuteRequest(
        sequence.sequence_id,
        tuple(tokens[begin : begin + count]),
        sequence.slot_id,
        not newest_only or not output_index,
        params,
        None,
        begin,
        is_new,
        block_ids,
        begin + count == known,
        output_index,
        sequence.seed,
        0,
        sequence.pending_copies,
        tokens if is_new and params.has_penalties else None,
        sequence.stop_ids if is_new and params.min_tokens else NO_TOKENS_STOP,
    )


def _memory_from_limits(max_batch_size: int | None, max_total_tokens: int | None) -> MemoryInfo:
    if max_batch_size is None or max_total_tokens is None:
        raise ConfigurationError(
            "scheduler: give the executor's MemoryInfo, or max_batch_size and max_total_tokens"
        )
    return MemoryInfo(
        num_blocks=max(1, max_total_tokens // _COMPAT_BLOCK),
        block_size=_COMPAT_BLOCK,
        max_slots=max_batch_size,
        max_context=max_total_tokens,
        max_batch_tokens=max(max_batch_size, min(_COMPAT_BUDGET, max_total_tokens)),
        vocab_size=2**31 - 1,
    )
