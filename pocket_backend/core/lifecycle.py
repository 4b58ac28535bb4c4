"""Where every live sequence is, and the only code that moves one.

| State | Place | Holds |
|---|---|---|
| WAITING, PREEMPTED | ``queue``, ``held``, or a group's ``unborn`` | nothing |
| RUNNING | ``running`` | a slot and a block table |
| FINISHED | nowhere | nothing |

Slots and blocks are given up in ``_release`` and nowhere else, so they cannot be freed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pocket_backend.api.errors import EngineError, InvalidRequestError
from pocket_backend.core.config import SchedulerConfig
from pocket_backend.core.prefix_wait import PrefixWait
from pocket_backend.core.queue import LongestPrefixQueue, OrderedQueue, WaitingQueue
from pocket_backend.core.request import NO_SLOT, RequestGroup, RequestStatus, ScheduledRequest
from pocket_backend.core.step import MemoryInfo
from pocket_backend.kv.manager import BlockManager, SequenceBlocks
from pocket_backend.kv.pool import IntegrityError

_RUNNING = RequestStatus.RUNNING
_FINISHED = RequestStatus.FINISHED
_MASK64 = 2**64 - 1


class Lifecycle:
    """Requests, slots and block tables. Attributes are read by the scheduler, changed only here."""

    def __init__(
        self, memory: MemoryInfo, config: SchedulerConfig, eos: frozenset[int], limit: int
    ) -> None:
        self._config = config
        self._eos = eos
        self._limit = limit
        self._max_slots = memory.max_slots
        self.blocks = self._make_blocks(memory, config)
        self.groups: dict[str, RequestGroup] = {}
        self.running: dict[ScheduledRequest, None] = {}
        """In order of admission."""
        self.queue: WaitingQueue = (
            LongestPrefixQueue(self._cached_length, config.lpm_window, config.lpm_max_overtakes)
            if config.policy == "lpm"
            else OrderedQueue()
        )
        self.held = self._make_prefix_wait(memory, config)
        self.num_unborn = 0
        self.free_slots = list(range(memory.max_slots - 1, -1, -1))
        self.slots_to_reset: list[int] = []
        self.suspects: dict[ScheduledRequest, None] = {}
        """Sequences of a failed step, to be run one at a time until the culprit is found."""
        self.admissions = 0
        self.preemptions = 0
        self.finished: Counter[str] = Counter()
        self._arrivals = 0

    def _make_blocks(self, memory: MemoryInfo, config: SchedulerConfig) -> BlockManager:
        return BlockManager(
            memory.num_blocks,
            memory.block_size,
            enable_prefix_cache=config.enable_prefix_cache,
            eviction=config.eviction,
        )

    def _make_prefix_wait(self, memory: MemoryInfo, config: SchedulerConfig) -> PrefixWait:
        return PrefixWait(memory.block_size, config.prefix_wait_steps)

    # -- in -----------------------------------------------------------------------------------

    def accept(self, first: ScheduledRequest, now: float) -> RequestGroup:
        """Queue a checked request, with its siblings when it asks for n > 1.

        Raises:
            InvalidRequestError: its id is in use, or it brings output and asks for n > 1.
            EngineError: the object was queued before.
        """
        name, params = first.request_id, first.sampling_params
        if first.group is not None:
            raise EngineError(f"{first!r} was queued before: make a new one")
        if name in self.groups:
            raise InvalidRequestError.of("request_id", name, "must not be in use already")
        if params.n > 1 and len(first.tokens) > first.num_prompt_tokens:
            raise InvalidRequestError.of("n", params.n, "must be 1 for a request with output")
        siblings = [
            ScheduledRequest(
                name,
                first.tokens,
                sampling_params=params,
                priority=first.priority,
                choice_index=index,
            )
            for index in range(1, params.n)
        ]
        group = RequestGroup(name, [first, *siblings])
        seed = params.seed
        if seed is None:
            seed = mix_seed(self._config.seed, self._arrivals)
        for sequence in group.sequences:
            sequence.namespace = first.namespace
            if siblings:
                sequence.sequence_id = f"{name}#{sequence.choice_index}"
            index = sequence.choice_index
            sequence.seed = mix_seed(seed, index) if index else seed & _MASK64
            self._prepare(sequence, group, now)
        self._arrivals += 1
        self.groups[name] = group
        self.num_unborn += len(group.unborn)
        self.queue.push(first)
        return group

    def _prepare(self, sequence: ScheduledRequest, group: RequestGroup, now: float) -> None:
        params, prompt = sequence.sampling_params, sequence.num_prompt_tokens
        sequence.group = group
        sequence.arrival_time = now
        sequence.status = RequestStatus.WAITING
        sequence.slot_id = NO_SLOT
        ageing = self._config.priority_ageing_seconds
        rank = 0.0
        if self._config.policy == "priority":
            # Linear ageing needs no re-sorting: waiting moves everyone by the same amount, so the
            # order of priority - (now - arrival) / ageing never changes.
            rank = sequence.priority + (now / ageing if ageing else 0.0)
        sequence.order = (rank, self._arrivals, sequence.choice_index)
        own_stops = frozenset(params.stop_token_ids)
        if params.ignore_eos or not own_stops:
            sequence.stop_ids = own_stops if params.ignore_eos else self._eos
        else:
            sequence.stop_ids = own_stops | self._eos
        sequence.min_length = prompt + params.min_tokens
        end = prompt + params.token_budget(prompt, self._limit)
        # A sequence that was begun elsewhere gets at least the token that it came for.
        sequence.end_length = max(end, len(sequence.tokens) + 1)

    def give_birth(self, group: RequestGroup) -> None:
        """Queue the siblings: the prompt that they share has been computed (or never will be)."""
        for sibling in group.unborn:
            self.queue.push(sibling)
        self.num_unborn -= len(group.unborn)
        group.unborn.clear()

    # -- queued and running -------------------------------------------------------------------

    def hold(self, sequence: ScheduledRequest, writer: SequenceBlocks, matched: int) -> None:
        """Take the queue's next sequence out until ``writer`` has computed their common prefix."""
        self.queue.pop(sequence)
        self.held.hold(sequence, writer, matched)

    def wake_held(self) -> None:
        for sequence in self.held.wake():
            self.queue.push(sequence)

    def start(
        self, sequence: ScheduledRequest, table: SequenceBlocks, computed: int, now: float
    ) -> None:
        """Run the queue's next sequence on ``table``, of which ``computed`` tokens have KV."""
        self.queue.pop(sequence)
        table.owner = sequence
        sequence.blocks = table
        sequence.num_computed_tokens = computed
        if not sequence.admitted:
            sequence.admitted = True
            sequence.first_scheduled_time = now
            sequence.cached_tokens = min(computed, sequence.num_prompt_tokens)
        sequence.status = _RUNNING
        sequence.slot_id = self.free_slots.pop()
        sequence.is_new = True
        sequence.num_sent_blocks = 0
        self.running[sequence] = None
        self.admissions += 1

    def preempt(self, sequence: ScheduledRequest) -> None:
        """Soft reset: an equivalent new request whose prompt includes the output so far."""
        self._release(sequence)
        sequence.status = RequestStatus.PREEMPTED
        sequence.redo_until = max(sequence.redo_until, sequence.num_computed_tokens)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.preemptions += 1
        self.queue.push(sequence)

    def grow(self, sequence: ScheduledRequest) -> bool:
        """Room for the next token, at the cost of the lowest ranked; False if that was itself."""
        table = sequence.blocks
        assert table is not None
        while not self.blocks.grow(table, sequence.num_computed_tokens + 1):
            # A sequence alone never gets here: its length is limited to the pool (token_limit).
            victim = max(self.running, key=lambda s: s.order)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def suspect(self, sequences: Iterable[ScheduledRequest]) -> None:
        """A step of these running sequences raised: let each run alone, from where it was."""
        for sequence in sequences:
            if sequence.pending_copies:
                # The copy's source may be gone by the next step: start again.
                self.preempt(sequence)
            else:
                self.suspects[sequence] = None
                sequence.is_new = True
                sequence.num_sent_blocks = 0

    # -- out ----------------------------------------------------------------------------------

    def end(self, sequence: ScheduledRequest, reason: str) -> bool:
        """Finish one live sequence, wherever it is; True if it was the last of its request."""
        group = sequence.group
        assert group is not None
        was_running = sequence.status is _RUNNING
        sequence.status = _FINISHED
        sequence.finish_reason = reason
        self.finished[reason] += 1
        if was_running:
            self._release(sequence)
        elif sequence in self.held:
            self.held.discard(sequence)
        elif sequence in group.unborn:
            group.unborn.remove(sequence)
            self.num_unborn -= 1
        else:
            self.queue.forget(sequence)
        if group.unborn and not sequence.choice_index:
            self.give_birth(group)
        if not group.finished:
            return False
        del self.groups[group.request_id]
        return True

    def end_group(self, group: RequestGroup, reason: str) -> list[ScheduledRequest]:
        """Finish all live sequences of a request; returns them, the lowest choice first."""
        live = [s for s in group.sequences if s.status is not _FINISHED]
        for sequence in live:
            self.end(sequence, reason)
        return live

    def _release(self, sequence: ScheduledRequest) -> None:
        table = sequence.blocks
        assert table is not None
        self.blocks.free(table)
        sequence.blocks = None
        sequence.pending_copies = ()
        del self.running[sequence]
        self.suspects.pop(sequence, None)
        self.free_slots.append(sequence.slot_id)
        self.slots_to_reset.append(sequence.slot_id)
        sequence.slot_id = NO_SLOT

    # -- looking ------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + len(self.held) + self.num_unborn

    def _cached_length(self, sequence: ScheduledRequest) -> int:
        return self.blocks.match(
            sequence.namespace, sequence.tokens, len(sequence.tokens)
        ).num_tokens

    def _placed(self) -> Iterator[ScheduledRequest]:
        yield from self.running
        yield from self.queue
        yield from self.held
        for group in self.groups.values():
            yield from group.unborn

    def check_integrity(self) -> None:
        """Verify places, slots and every KV block. O(pool).

        Raises:
            IntegrityError: says what does not add up.
        """
        slots = [s.slot_id for s in self.running]
        if sorted(slots + self.free_slots) != list(range(self._max_slots)):
            raise IntegrityError(f"slots in use {slots}, free {self.free_slots}")
        live = {s for g in self.groups.values() for s in g.sequences if s.status is not _FINISHED}
        placed = list(self._placed())
        if len(placed) != len(live) or set(placed) != live:
            raise IntegrityError(f"{len(live)} live sequences, {len(placed)} in some place")
        if len(placed) != len(self.running) + self.num_waiting:
            raise IntegrityError("a queue's length is wrong")
        tables = [s.blocks for s in self.running if s.blocks is not None]
        if len(tables) != len(self.running) or any(s.status is not _RUNNING for s in self.running):
            raise IntegrityError("a sequence runs without blocks, or has another state")
        self.blocks.check_integrity(tables)


def mix_seed(seed: int, index: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): well spread 64-bit seeds."""
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
