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

2 to 5 are ``sharing.BudgetSharing``; what becomes of a sequence is ``lifecycle.Lifecycle``.

A pure data structure: no threads, no clock (``now`` is seconds on any monotonic scale), no tensors,
no logging. Cost per step: O(sequences and new blocks in the step); contexts are never walked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

from pocket_backend.api.errors import (
    ConfigurationError,
    DeadlineExceededError,
    EngineError,
    OverloadedError,
)
from pocket_backend.api.types import GenerationRequest
from pocket_backend.core.admission import check_request
from pocket_backend.core.config import SchedulerConfig
from pocket_backend.core.deadlines import DeadlineQueue
from pocket_backend.core.parts import make_parts
from pocket_backend.core.plan import SchedulerStats, SequenceUpdate, StepPlan
from pocket_backend.core.request import RequestStatus, ScheduledRequest
from pocket_backend.core.sharing import Shares
from pocket_backend.core.step import ExecuteOutput, ExecuteRequest, MemoryInfo

_RUNNING = RequestStatus.RUNNING
_FINISHED = RequestStatus.FINISHED
_COMPAT_BLOCK = 16
_COMPAT_BUDGET = 512


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
        self._life, self._sharing, self._ask = make_parts(memory, config, self._eos)
        self._deadlines = DeadlineQueue()
        self._in_flight: StepPlan | None = None
        self._last_now = 0.0
        self._steps = self._stalled = 0
        self._computed = self._recomputed = 0

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
        startable = max(0, self._sharing.max_running - len(life.running))
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
        expired = self._expire(now) if now >= self._deadlines.earliest else ()
        if life.held:
            life.wake_held()
        preemptions, admissions = life.preemptions, life.admissions
        shares = self._sharing.share(now, self._steps)
        self._stalled = 0 if shares or not life.groups else self._stalled + 1
        if not shares and not expired and not life.slots_to_reset:
            return None
        requests, sequences, total, prefill = self._ask_for(shares)
        plan = StepPlan(
            requests,
            sequences,
            tuple(life.slots_to_reset),
            expired,
            total,
            prefill,
            life.admissions - admissions,
            life.preemptions - preemptions,
        )
        life.slots_to_reset.clear()
        if requests:
            self._in_flight = plan
            self._steps += 1
        return plan

    def _ask_for(
        self, shares: Shares
    ) -> tuple[tuple[ExecuteRequest, ...], tuple[ScheduledRequest, ...], int, int]:
        """The executor's requests, whose they are, and their tokens: all, and of prefills."""
        size, ask = self.memory.block_size, self._ask
        requests, sequences = [], []
        total = prefill = 0
        for sequence, count in shares:
            request = ask(sequence, count, size)
            requests.append(request)
            sequences.append(sequence)
            total += count
            if request.is_prefill:
                prefill += count
        return tuple(requests), tuple(sequences), total, prefill

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
        self._life.suspect(alive)
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
            snapshots=life.blocks.snapshot_usage(),
            steps=self._steps,
            admissions=life.admissions,
            preemptions=life.preemptions,
            finished=MappingProxyType(dict(life.finished)),
            computed_tokens=self._computed,
            recomputed_tokens=self._recomputed,
            prefix_query_tokens=self._sharing.queried_tokens,
            prefix_hit_tokens=self._sharing.hit_tokens,
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
