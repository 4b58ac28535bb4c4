"""ContinuousBatchScheduler: which tokens of which sequences the next step computes.

docs/scheduling.md explains the policy; this is its order of decisions in one step:

1. expire deadlines; wake requests whose shared prefix has been computed;
2. every running sequence that needs one token gets it, growing its table, preempting the lowest
   ranked if memory is short;
3. unfinished prompts share the rest of the budget, the highest ranked first, none more than
   ``1 - reserved_share`` of what is left while others have work;
4. waiting requests are admitted in policy order while slots, blocks and budget last (none in a step
   that preempted);
5. what is still left goes to the chunks of 3 and 4.

A pure data structure: no threads, no clock (``now`` is seconds on any monotonic scale), no tensors,
no logging. Cost per step: O(sequences and new blocks in the step); contexts are never walked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from pocket_backend.api.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from pocket_backend.api.types import GenerationRequest
from pocket_backend.core.admission import check_request, token_limit
from pocket_backend.core.config import SchedulerConfig
from pocket_backend.core.deadlines import DeadlineQueue
from pocket_backend.core.plan import SchedulerStats, SequenceUpdate, StepPlan
from pocket_backend.core.prefix_wait import PrefixWait
from pocket_backend.core.queue import LongestPrefixQueue, OrderedQueue, WaitingQueue
from pocket_backend.core.request import (
    NO_SLOT,
    RequestGroup,
    RequestStatus,
    ScheduledRequest,
)
from pocket_backend.core.step import ExecuteOutput, ExecuteRequest, MemoryInfo
from pocket_backend.kv.manager import BlockManager
from pocket_backend.kv.pool import IntegrityError

_RUNNING = RequestStatus.RUNNING
_FINISHED = RequestStatus.FINISHED
_MASK64 = 2**64 - 1
_COMPAT_BLOCK = 16

_BLOCKED_RETRY_STEPS = 16
"""A request that did not fit is looked up again when enough blocks are available, and at least this
often in case someone else has cached more of its prefix meanwhile."""


class ContinuousBatchScheduler:
    """Owns all requests, slots and (through ``BlockManager``) KV block ids.

    One plan is in flight at a time: ``schedule`` -> execute -> ``update`` (or ``fail_step``).
    ``add_request``, ``cancel`` and ``finish`` may come at any point between, from the same thread.

    Args:
        memory: sizes of the executor; or give the older ``max_batch_size`` and
            ``max_total_tokens`` (capacity of the KV pool in tokens) instead.
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
        enable_prefix_cache: bool | None = None,
    ) -> None:
        if memory is None:
            memory = _memory_from_limits(max_batch_size, max_total_tokens)
        if config is None:
            config = SchedulerConfig(
                enable_prefix_cache=True if enable_prefix_cache is None else enable_prefix_cache
            )
        self.memory = memory
        self.config = config
        self._eos = frozenset(eos_token_ids)
        self._budget = min(memory.max_batch_tokens, config.max_batch_tokens or 2**31)
        # Never more sequences than tokens in a step: every decode is in every step.
        self._max_running = min(memory.max_slots, config.max_running or 2**31, self._budget)
        self._limit = token_limit(memory)
        self._watermark = math.ceil(config.watermark * memory.num_blocks)
        self._blocks = BlockManager(
            memory.num_blocks,
            memory.block_size,
            enable_prefix_cache=config.enable_prefix_cache,
            eviction=config.eviction,
        )
        self._groups: dict[str, RequestGroup] = {}
        self._running: dict[ScheduledRequest, None] = {}
        self._queue: WaitingQueue = (
            LongestPrefixQueue(self._cached_length, config.lpm_window, config.lpm_max_overtakes)
            if config.policy == "lpm"
            else OrderedQueue()
        )
        self._held = PrefixWait(memory.block_size, config.prefix_wait_steps)
        self._num_unborn = 0
        self._suspects: dict[ScheduledRequest, None] = {}
        """Sequences of a failed step, to be run one at a time until the culprit is found."""
        self._deadlines = DeadlineQueue()
        self._free_slots = list(range(memory.max_slots - 1, -1, -1))
        self._reset_slots: list[int] = []
        self._in_flight: StepPlan | None = None
        self._last_now = 0.0
        self._arrivals = 0
        self._blocked: ScheduledRequest | None = None
        self._blocked_until = (0, 0)
        self._steps = self._admissions = self._preemptions = self._stalled = 0
        self._computed = self._recomputed = self._queried = self._hits = 0
        self._finished: Counter[str] = Counter()

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
        name = first.request_id
        if name in self._groups:
            raise InvalidRequestError.of("request_id", name, "must not be in use already")
        check_request(first, self.memory)
        n = first.sampling_params.n
        if n > 1 and len(first.tokens) > first.num_prompt_tokens:
            raise InvalidRequestError.of("n", n, "must be 1 for a request that brings output")
        waiting = len(self._queue) + len(self._held)
        startable = max(0, self._max_running - len(self._running))
        if waiting >= self.config.max_queue + startable:
            raise OverloadedError(
                f"{waiting} requests are waiting (max_queue {self.config.max_queue}); retry later"
            )
        now = self._advance(first.arrival_time if now is None else now)
        group = RequestGroup(name, [first])
        self._prepare(first, group, now, first.sampling_params.seed)
        for index in range(1, n):
            sibling = ScheduledRequest(
                name,
                first.tokens,
                sampling_params=first.sampling_params,
                priority=first.priority,
                choice_index=index,
            )
            sibling.namespace = first.namespace
            self._prepare(sibling, group, now, _mix(first.seed, index))
            group.sequences.append(sibling)
            group.unborn.append(sibling)
        if n > 1:
            for sequence in group.sequences:
                sequence.sequence_id = f"{name}#{sequence.choice_index}"
        self._arrivals += 1
        self._groups[name] = group
        self._num_unborn += len(group.unborn)
        self._queue.push(first)
        deadline = first.deadline_seconds or self.config.default_deadline_seconds
        self._deadlines.add(group, now, deadline, self.config.queue_timeout_seconds)
        return first

    def cancel(self, request_id: str) -> bool:
        """End all sequences of the request, whatever their state; False if it is not known.

        Slots and blocks are free at once. Output of a step in flight is ignored.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        self._end_group(group, "cancelled")
        return True

    def finish(self, request_id: str, reason: str = "stop", choice_index: int = 0) -> bool:
        """End one sequence for a reason found outside (a stop string); False if it has ended."""
        group = self._groups.get(request_id)
        if group is None or not 0 <= choice_index < len(group.sequences):
            return False
        sequence = group.sequences[choice_index]
        if sequence.status is _FINISHED:
            return False
        self._end(sequence, reason)
        return True

    def has_work(self) -> bool:
        """Whether ``schedule`` may have something to return."""
        return bool(self._groups) or bool(self._reset_slots)

    # -- a step -------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to run or to report.

        Raises:
            EngineError: the last plan has been neither updated nor failed.
        """
        if self._in_flight is not None:
            raise EngineError("schedule: the last plan needs update() or fail_step() first")
        now = self._advance(now)
        expired = self._expire(now)
        for sequence in self._held.wake():
            self._queue.push(sequence)
        preemptions, admissions = self._preemptions, self._admissions
        shares = self._share_one_suspect() or self._share_budget(now)
        preempted = self._preemptions - preemptions
        self._stalled = 0 if shares or not self._groups else self._stalled + 1
        if not shares and not expired and not self._reset_slots:
            return None
        requests = tuple([self._request(sequence, count) for sequence, count in shares])
        total = sum([count for _, count in shares])
        plan = StepPlan(
            requests=requests,
            sequences=tuple([sequence for sequence, _ in shares]),
            reset_slots=tuple(self._reset_slots),
            finished=expired,
            num_tokens=total,
            num_prefill_tokens=total - sum([not r.is_prefill for r in requests]),
            num_admitted=self._admissions - admissions,
            num_preempted=preempted,
        )
        self._reset_slots.clear()
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
        for asked, output in zip(plan.requests, outputs, strict=True):
            if asked.request_id != output.request_id:
                raise EngineError("the executor returned outputs in another order")
        self._in_flight = None
        now = self._advance(now)
        updates: list[SequenceUpdate] = []
        commit = self._blocks.commit
        block_size = self.memory.block_size
        for asked, sequence, output in zip(plan.requests, plan.sequences, outputs, strict=True):
            if sequence.status is not _RUNNING:
                continue
            token = output.token_id
            if output.finish_reason == "error" or (token is None and asked.samples):
                error = EngineError(output.error or "the executor returned no token")
                updates.append(self._fail(sequence, error))
                continue
            if asked.is_new:
                sequence.pending_copies = ()
            begin = asked.start_position
            end = begin + len(asked.token_ids)
            sequence.num_computed_tokens = end
            if begin < sequence.redo_until:
                self._recomputed += min(end, sequence.redo_until) - begin
            tokens = sequence.tokens
            if token is not None and asked.samples:
                tokens.append(token)
            if begin // block_size != end // block_size:
                blocks = sequence.blocks
                assert blocks is not None
                commit(blocks, tokens, end)
            if not asked.samples:
                continue
            assert token is not None
            if sequence.first_token_time is None:
                sequence.first_token_time = now
                group = sequence.group
                if group is not None and group.unborn:
                    self._give_birth(group)
            update = SequenceUpdate(sequence, (token,), output.logprobs)
            updates.append(update)
            if token in sequence.stop_ids and len(tokens) >= sequence.min_length:
                if token not in self._eos or sequence.sampling_params.ignore_eos:
                    update.stop_reason = token
                update.finish_reason = "stop"
                update.request_done = self._end(sequence, "stop")
            elif len(tokens) >= sequence.end_length:
                update.finish_reason = "length"
                update.request_done = self._end(sequence, "length")
        self._computed += plan.num_tokens
        if self._suspects:
            for sequence in plan.sequences:
                self._suspects.pop(sequence, None)
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
            self._suspects[sequence] = None
            if sequence.pending_copies:
                # The copy's source may be gone by the next step.
                self._preempt(sequence)
            else:
                sequence.is_new = True
                sequence.num_sent_blocks = 0
        return ()

    # -- older names --------------------------------------------------------------------------

    def schedule_step(
        self, outputs: Sequence[ExecuteOutput] = (), now: float | None = None
    ) -> tuple[tuple[ExecuteRequest, ...], tuple[ExecuteRequest, ...]]:
        """The older call: (prefill batch, decode batch) of the next step.

        ``outputs`` are those of the batches returned last time, prefill first. Without ``now`` the
        time of the last call is used, so deadlines do not pass.
        """
        now = self._last_now if now is None else now
        if self._in_flight is not None:
            plan = self._in_flight
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
        group = self._groups.get(request_id)
        if group is not None:
            self._end_group(group, "stop")

    # -- what others look at ------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._queue) + len(self._held) + self._num_unborn,
            held_back=len(self._held),
            free_slots=len(self._free_slots),
            blocks=self._blocks.usage(),
            steps=self._steps,
            admissions=self._admissions,
            preemptions=self._preemptions,
            finished=MappingProxyType(dict(self._finished)),
            computed_tokens=self._computed,
            recomputed_tokens=self._recomputed,
            prefix_query_tokens=self._queried,
            prefix_hit_tokens=self._hits,
            evicted_blocks=self._blocks.num_evicted,
            stalled_schedules=self._stalled,
        )

    def check_integrity(self) -> None:
        """Verify slots, states and every KV block. O(pool); meant for idle times and tests.

        Raises:
            IntegrityError: says what does not add up.
        """
        slots = [s.slot_id for s in self._running]
        if sorted(slots + self._free_slots) != list(range(self.memory.max_slots)):
            raise IntegrityError(f"slots in use {slots}, free {self._free_slots}")
        known: set[ScheduledRequest] = set()
        for group in self._groups.values():
            known.update(s for s in group.sequences if s.status is not _FINISHED)
        places = (self._running, self._queue, self._held)
        placed = [s for place in places for s in place]
        placed += [s for group in self._groups.values() for s in group.unborn]
        if len(placed) != len(known) or set(placed) != known:
            raise IntegrityError(f"{len(known)} live sequences, {len(placed)} in some queue")
        if len(self._queue) != sum(1 for _ in self._queue):
            raise IntegrityError("the queue's length is wrong")
        tables = []
        for sequence in self._running:
            if sequence.status is not _RUNNING or sequence.blocks is None:
                raise IntegrityError(f"{sequence!r} runs without blocks")
            tables.append(sequence.blocks)
        self._blocks.check_integrity(tables)

    def clear_prefix_cache(self) -> int:
        """Forget every cached prefix that no sequence uses; returns how many blocks that freed."""
        return self._blocks.clear_cache()

    # -- deciding -----------------------------------------------------------------------------

    def _share_budget(self, now: float) -> list[tuple[ScheduledRequest, int]]:
        block_size = self.memory.block_size
        preemptions = self._preemptions
        decodes: list[tuple[ScheduledRequest, int]] = []
        prefills: list[ScheduledRequest] = []
        for sequence in list(self._running):
            if sequence.status is not _RUNNING:
                continue  # preempted for one before it
            computed = sequence.num_computed_tokens
            if len(sequence.tokens) - computed > 1:
                prefills.append(sequence)
            elif computed % block_size or self._grow(sequence):
                decodes.append((sequence, 1))
        admitting = self._preemptions == preemptions
        if not admitting:
            decodes = [share for share in decodes if share[0].status is _RUNNING]
            prefills = [sequence for sequence in prefills if sequence.status is _RUNNING]
        left = self._budget - len(decodes)
        if prefills:
            # The highest ranked makes steady progress; of the others the shortest goes first, so
            # a newcomer is not behind several long prompts.
            head = min(prefills, key=lambda s: s.order)
            prefills.sort(
                key=lambda s: (s is not head, len(s.tokens) - s.num_computed_tokens, s.order)
            )
        chunks: list[tuple[ScheduledRequest, int]] = []
        for index, sequence in enumerate(prefills):
            if left <= 0:
                break
            more = index + 1 < len(prefills) or (admitting and self._can_admit())
            count = self._chunk(sequence, left, more=more)
            chunks.append((sequence, count))
            left -= count
        while admitting and left > 0 and self._can_admit():
            candidate = self._queue.peek()
            if candidate is None:
                break
            admitted = self._admit(candidate, now)
            if admitted is None:
                break
            if admitted:
                count = self._chunk(candidate, left, more=self._can_admit())
                chunks.append((candidate, count))
                left -= count
        if left > 0:
            for index, (sequence, count) in enumerate(chunks):
                extra = min(left, len(sequence.tokens) - sequence.num_computed_tokens - count)
                if extra:
                    chunks[index] = (sequence, count + extra)
                    left -= extra
        return decodes + chunks

    def _chunk(self, sequence: ScheduledRequest, left: int, *, more: bool) -> int:
        cap = left
        if more:
            cap = max(1, left - math.ceil(left * self.config.reserved_share))
        return min(len(sequence.tokens) - sequence.num_computed_tokens, cap)

    def _share_one_suspect(self) -> list[tuple[ScheduledRequest, int]]:
        while self._suspects:
            sequence = next(iter(self._suspects))
            if sequence.status is _RUNNING and self._grow(sequence):
                known = len(sequence.tokens) - sequence.num_computed_tokens
                return [(sequence, min(known, self._budget))]
            self._suspects.pop(sequence, None)
        return []

    def _can_admit(self) -> bool:
        # A held-back request keeps its place: its turn has come, only its prefix is not there yet.
        return len(self._queue) > 0 and (len(self._running) + len(self._held) < self._max_running)

    def _admit(self, sequence: ScheduledRequest, now: float) -> bool | None:
        """Start the queue's next sequence. False: held back; None: not enough blocks."""
        reserve = self._watermark if self._running else 0
        blocks = self._blocks
        if self._is_blocked(sequence, reserve):
            return None
        parent = self._fork_parent(sequence)
        if parent is not None:
            if blocks.num_available - 1 < reserve:
                return None
            assert parent.blocks is not None
            forked = blocks.fork(parent.blocks, sequence.num_prompt_tokens - 1)
            assert forked is not None
            table, sequence.pending_copies = forked
            blocks.grow(table, sequence.num_prompt_tokens)
            computed = sequence.num_prompt_tokens - 1
        else:
            known = len(sequence.tokens)
            match = blocks.match(sequence.namespace, sequence.tokens, known)
            if self._held.may_wait(sequence):
                writer = blocks.writer_of(match, sequence.tokens)
                if writer is not None:
                    self._queue.pop(sequence)
                    self._held.hold(sequence, writer, len(match.path))
                    return False
            taken = blocks.allocate(match, sequence.tokens, known, reserve=reserve)
            if taken is None:
                self._blocked = sequence
                needed = blocks.cost(match, known) + reserve
                self._blocked_until = (needed, self._steps + _BLOCKED_RETRY_STEPS)
                return None
            table, computed = taken, match.num_tokens
            if not sequence.admitted:
                self._queried += known
                self._hits += computed
        self._queue.pop(sequence)
        self._blocked = None
        table.owner = sequence
        sequence.blocks = table
        sequence.num_computed_tokens = computed
        if not sequence.admitted:
            sequence.admitted = True
            sequence.first_scheduled_time = now
            sequence.cached_tokens = min(computed, sequence.num_prompt_tokens)
        sequence.status = _RUNNING
        sequence.slot_id = self._free_slots.pop()
        sequence.is_new = True
        sequence.num_sent_blocks = 0
        self._running[sequence] = None
        self._admissions += 1
        return True

    def _is_blocked(self, sequence: ScheduledRequest, reserve: int) -> bool:
        available = self._blocks.num_available
        if available <= reserve:
            return True
        if self._blocked is not sequence or not self._running:
            return False
        needed, retry_step = self._blocked_until
        return available < needed and self._steps < retry_step

    def _fork_parent(self, sequence: ScheduledRequest) -> ScheduledRequest | None:
        """The first sequence of the group, if ``sequence`` can start from its blocks."""
        group = sequence.group
        if not sequence.choice_index or group is None or not self.config.block_copies:
            return None
        parent = group.sequences[0]
        prompt = sequence.num_prompt_tokens
        if (
            parent.status is _RUNNING
            and parent.num_computed_tokens >= prompt
            and len(sequence.tokens) == prompt
        ):
            return parent
        return None

    def _grow(self, sequence: ScheduledRequest) -> bool:
        """Room for the next token; False if ``sequence`` itself had to give way."""
        blocks = sequence.blocks
        assert blocks is not None
        while not self._blocks.grow(blocks, sequence.num_computed_tokens + 1):
            # A sequence alone never gets here: its length is limited to the pool (token_limit).
            victim = max(self._running, key=lambda s: s.order)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _request(self, sequence: ScheduledRequest, count: int) -> ExecuteRequest:
        begin = sequence.num_computed_tokens
        tokens = sequence.tokens
        known = len(tokens)
        blocks = sequence.blocks
        assert blocks is not None
        ids = blocks.block_ids
        sent = sequence.num_sent_blocks
        delta: tuple[int, ...] = ()
        if sent != len(ids):
            delta = tuple(ids[sent:])
            sequence.num_sent_blocks = len(ids)
        is_new = sequence.is_new
        output_index = known - sequence.num_prompt_tokens
        decode = begin == known - 1
        sequence.is_new = False
        # Positional, and in the order of the fields: this runs once per sequence and step.
        return ExecuteRequest(
            sequence.sequence_id,
            (tokens[begin],) if decode else tuple(tokens[begin : begin + count]),
            sequence.slot_id,
            not decode or not output_index,
            sequence.sampling_params,
            None,
            begin,
            is_new,
            delta,
            begin + count == known,
            output_index,
            sequence.seed,
            0,
            sequence.pending_copies,
        )

    # -- changing states ----------------------------------------------------------------------

    def _prepare(
        self, sequence: ScheduledRequest, group: RequestGroup, now: float, seed: int | None
    ) -> None:
        params = sequence.sampling_params
        sequence.group = group
        sequence.arrival_time = now
        sequence.status = RequestStatus.WAITING
        sequence.slot_id = NO_SLOT
        if seed is None:
            seed = _mix(self.config.seed, self._arrivals)
        sequence.seed = seed & _MASK64
        ageing = self.config.priority_ageing_seconds
        rank = 0.0
        if self.config.policy == "priority":
            # Linear ageing needs no re-sorting: waiting moves everyone by the same amount, so the
            # order of priority - (now - arrival) / ageing never changes.
            rank = sequence.priority + (now / ageing if ageing else 0.0)
        sequence.order = (rank, self._arrivals, sequence.choice_index)
        stop = frozenset(params.stop_token_ids)
        sequence.stop_ids = stop if params.ignore_eos else (stop | self._eos if stop else self._eos)
        sequence.min_length = sequence.num_prompt_tokens + params.min_tokens
        budget = params.token_budget(sequence.num_prompt_tokens, self._limit)
        sequence.end_length = max(sequence.num_prompt_tokens + budget, len(sequence.tokens) + 1)

    def _give_birth(self, group: RequestGroup) -> None:
        """Queue the siblings: the prompt that they share has been computed (or never will be)."""
        for sibling in group.unborn:
            self._queue.push(sibling)
        self._num_unborn -= len(group.unborn)
        group.unborn.clear()

    def _preempt(self, sequence: ScheduledRequest) -> None:
        """Soft reset: an equivalent new request whose prompt includes the output so far."""
        self._release(sequence)
        sequence.status = RequestStatus.PREEMPTED
        sequence.redo_until = max(sequence.redo_until, sequence.num_computed_tokens)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._preemptions += 1
        self._queue.push(sequence)

    def _release(self, sequence: ScheduledRequest) -> None:
        """The one way in which a running sequence gives up its slot and its blocks."""
        blocks = sequence.blocks
        assert blocks is not None
        self._blocks.free(blocks)
        sequence.blocks = None
        sequence.pending_copies = ()
        del self._running[sequence]
        self._suspects.pop(sequence, None)
        self._free_slots.append(sequence.slot_id)
        self._reset_slots.append(sequence.slot_id)
        sequence.slot_id = NO_SLOT

    def _end(self, sequence: ScheduledRequest, reason: str) -> bool:
        """Finish one live sequence, wherever it is; True if it was the last of its request."""
        group = sequence.group
        assert group is not None
        if sequence.status is _RUNNING:
            self._release(sequence)
            sequence.status = _FINISHED
        elif sequence in self._held:
            self._held.discard(sequence)
            sequence.status = _FINISHED
        elif sequence in group.unborn:
            group.unborn.remove(sequence)
            self._num_unborn -= 1
            sequence.status = _FINISHED
        else:
            sequence.status = _FINISHED
            self._queue.forget(sequence)
        sequence.finish_reason = reason
        self._finished[reason] += 1
        if group.unborn and not sequence.choice_index:
            self._give_birth(group)
        if not group.finished:
            return False
        del self._groups[group.request_id]
        return True

    def _end_group(self, group: RequestGroup, reason: str) -> list[ScheduledRequest]:
        # Siblings first: ending the first sequence would put the unborn ones on the queue.
        live = [s for s in reversed(group.sequences) if s.status is not _FINISHED]
        for sequence in live:
            self._end(sequence, reason)
        return live[::-1]

    def _fail(self, sequence: ScheduledRequest, error: Exception) -> SequenceUpdate:
        done = self._end(sequence, "error")
        return SequenceUpdate(sequence, finish_reason="error", error=error, request_done=done)

    def _expire(self, now: float) -> tuple[SequenceUpdate, ...]:
        updates: list[SequenceUpdate] = []
        while (expired := self._deadlines.pop_expired(now)) is not None:
            group, message = expired
            ended = self._end_group(group, "error")
            updates.extend(
                SequenceUpdate(s, finish_reason="error", error=DeadlineExceededError(message))
                for s in ended
            )
            updates[-1].request_done = True
        return tuple(updates)

    # -- small things -------------------------------------------------------------------------

    def _cached_length(self, sequence: ScheduledRequest) -> int:
        match = self._blocks.match(sequence.namespace, sequence.tokens, len(sequence.tokens))
        return match.num_tokens

    def _check_in_flight(self, plan: StepPlan) -> None:
        if plan is not self._in_flight:
            raise EngineError("this plan is not in flight: each is updated or failed exactly once")

    def _advance(self, now: float) -> float:
        # Time never goes back for us, so arrival times stay in order of arrival.
        self._last_now = max(self._last_now, now)
        return self._last_now


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
        max_batch_tokens=max(max_batch_size, min(512, max_total_tokens)),
        vocab_size=2**31 - 1,
    )


def _mix(seed: int, index: int) -> int:
    """SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): distinct, well spread 64-bit seeds."""
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
