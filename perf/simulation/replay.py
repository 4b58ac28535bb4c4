"""One server in virtual time: a trace through the real ``ContinuousBatchScheduler``.

The loop is the engine's: take in what has arrived, ``schedule``, execute, ``update``. Executing is
adding the cost model's seconds to the clock. Requests that arrive during a step are seen after it.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perf.simulation.cost import CostModel, attended_positions
from perf.simulation.trace import MAX_PREFIX_TOKENS, TraceRequest
from pocket_backend.api import InvalidRequestError, OverloadedError, SamplingParams
from pocket_backend.core import (
    ContinuousBatchScheduler,
    ExecuteOutput,
    MemoryInfo,
    RequestStatus,
    ScheduledRequest,
    SchedulerConfig,
    StepPlan,
)

_OWN_TOKENS = 1 << 30
"""Ids from here on are nobody's but one request's; below are those of shared prefixes."""
VOCABULARY = (1 << 31) - 1
_MAX_PREFIXES = _OWN_TOKENS // MAX_PREFIX_TOKENS


@dataclass(frozen=True, slots=True)
class Server:
    """Sizes of the simulated executor (the project's defaults) and what its steps take."""

    cost: CostModel
    slots: int = 16
    kv_tokens: int = 32768
    budget: int = 512
    max_context: int = 8192
    block_size: int = 16

    def memory(self) -> MemoryInfo:
        return MemoryInfo(
            num_blocks=max(1, self.kv_tokens // self.block_size),
            block_size=self.block_size,
            max_slots=self.slots,
            max_context=self.max_context,
            max_batch_tokens=self.budget,
            vocab_size=VOCABULARY,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trace on one server. Arrays of one entry per *finished* request, in order of
    finishing, unless said otherwise; seconds of virtual time."""

    index: np.ndarray
    """Position in the trace."""
    arrival: np.ndarray
    first_token: np.ndarray
    finish: np.ndarray
    output_tokens: np.ndarray
    gap_seconds: np.ndarray
    """Times between two tokens of one request, equal ones of a step together."""
    gap_counts: np.ndarray
    refused: int
    """Not accepted: too long for the server, or the queue was full."""
    failed: int
    """Ended with an error (a deadline) or with their session's earlier turn."""
    seconds: float
    """Time of the last step's end."""
    busy_seconds: float
    steps: int
    preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int


class _Client:
    """Turns trace entries into requests: token ids, sessions, arrival times."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self._trace = trace
        self._next_own = _OWN_TOKENS
        self._prefixes: dict[str, int] = {}
        self._later: dict[str, list[int]] = {}
        self._due: list[tuple[float, int]] = []
        self._history: dict[int, array[int]] = {}
        for index, entry in enumerate(trace):
            if entry.session:
                turns = self._later.setdefault(entry.session, [])
                turns.append(index)
                if len(turns) > 1:
                    continue
            self._due.append((entry.arrival_seconds, index))
        for turns in self._later.values():
            turns.reverse()
            turns.pop()  # the first turn is due; the rest are taken from the end
        heapq.heapify(self._due)

    def next_arrival(self) -> float | None:
        return self._due[0][0] if self._due else None

    def pop(self) -> tuple[float, int, ScheduledRequest, int]:
        """Arrival, position in the trace, the request, and the token id of its whole output."""
        arrival, index = heapq.heappop(self._due)
        entry = self._trace[index]
        tokens = self._history.pop(index, None)
        if tokens is None:
            tokens = array("i")
            if entry.prefix:
                tokens.extend(self._prefix(entry.prefix, entry.prefix_tokens))
        needed = entry.prompt_tokens + 1
        if self._next_own + needed >= VOCABULARY:
            self._next_own = _OWN_TOKENS  # a billion tokens later nothing of them is cached
        begin = self._next_own
        self._next_own += needed
        tokens.extend(range(begin, begin + entry.prompt_tokens))
        request = ScheduledRequest(
            str(index),
            tokens,
            sampling_params=SamplingParams(
                max_tokens=entry.output_tokens, ignore_eos=True, temperature=0.0
            ),
            priority=entry.priority,
        )
        return arrival, index, request, begin + entry.prompt_tokens

    def answered(self, index: int, tokens: array[int], now: float) -> None:
        """The answer to a turn is complete: the session's next one becomes due."""
        entry = self._trace[index]
        turns = self._later.get(entry.session) if entry.session else None
        if turns:
            following = turns.pop()
            later = self._trace[following]
            self._history[following] = array("i", tokens)
            due = max(later.arrival_seconds, now + later.think_seconds)
            heapq.heappush(self._due, (due, following))

    def abandon(self, index: int) -> int:
        """The turn failed, so the session's later ones are never sent; returns how many."""
        entry = self._trace[index]
        return len(self._later.pop(entry.session, ())) if entry.session else 0

    def _prefix(self, name: str, count: int) -> range:
        number = self._prefixes.setdefault(name, len(self._prefixes))
        if number >= _MAX_PREFIXES:
            raise ValueError(f"more than {_MAX_PREFIXES} different prefixes on one server")
        begin = number * MAX_PREFIX_TOKENS
        return range(begin, begin + count)


class _Running:
    """What the clock remembers of a request."""

    __slots__ = ("arrival", "first", "index", "outputs", "stopped_at")

    def __init__(self, index: int, arrival: float, name: str, token: int) -> None:
        self.index = index
        self.arrival = arrival
        self.first = -1.0
        self.outputs = (ExecuteOutput(name, None), ExecuteOutput(name, token))
        """By ``ExecuteRequest.samples``; made once, since they are the same in every step."""
        self.stopped_at = -1.0
        """When it got its last token before a preemption; negative while its tokens flow."""


class Replay:
    """See the module. ``run`` may be called once."""

    def __init__(
        self, trace: Sequence[TraceRequest], server: Server, config: SchedulerConfig
    ) -> None:
        self._client = _Client(trace)
        self._server = server
        self._scheduler = ContinuousBatchScheduler(server.memory(), config)
        self._live: dict[str, _Running] = {}
        self._sampled: dict[str, ExecuteOutput] = {}
        self._finished: list[tuple[int, float, float, float, int]] = []
        self._gap_seconds = array("d")
        self._gap_counts = array("q")
        self._refused = self._failed = 0
        self._stopped = 0
        """Requests whose output is interrupted by a preemption."""
        self._busy = 0.0
        self._steady: list[ExecuteOutput] | None = None
        """Outputs of the last step, while every step is a decode of the same sequences."""
        self._attended = 0
        self._last: StepPlan | None = None
        self._last_end = 0.0

    def run(self, *, check_every: int = 0) -> Outcome:
        """Replay the whole trace. ``check_every`` steps (0: never) the books are checked.

        Raises:
            RuntimeError: the scheduler has work and nothing to run: it would never end.
            IntegrityError: from the check.
        """
        scheduler, client = self._scheduler, self._client
        now = 0.0
        steps = 0
        while True:
            arrival = client.next_arrival()
            while arrival is not None and arrival <= now:
                self._submit(now)
                arrival = client.next_arrival()
            plan = scheduler.schedule(now)
            if plan is not None and plan.finished:
                for update in plan.finished:
                    self._fail(update.request_id)
            if plan is None or not plan.requests:
                if plan is None:
                    if arrival is not None:
                        now = arrival
                    elif scheduler.has_work():
                        raise RuntimeError(f"no progress at {now} s: {scheduler.stats()}")
                    else:
                        break
                continue
            now = self._execute(plan, now)
            steps += 1
            if check_every and steps % check_every == 0:
                scheduler.check_integrity()
        columns = list(zip(*self._finished, strict=True)) or [()] * 5
        index, arrivals, first, finish, output = columns
        stats = scheduler.stats()
        return Outcome(
            index=np.array(index, dtype=np.int64),
            arrival=np.array(arrivals, dtype=np.float64),
            first_token=np.array(first, dtype=np.float64),
            finish=np.array(finish, dtype=np.float64),
            output_tokens=np.array(output, dtype=np.int64),
            gap_seconds=np.array(self._gap_seconds, dtype=np.float64),
            gap_counts=np.array(self._gap_counts, dtype=np.int64),
            refused=self._refused,
            failed=self._failed,
            seconds=self._last_end,
            busy_seconds=self._busy,
            steps=stats.steps,
            preemptions=stats.preemptions,
            computed_tokens=stats.computed_tokens,
            recomputed_tokens=stats.recomputed_tokens,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
        )

    def _submit(self, now: float) -> None:
        arrival, index, request, token = self._client.pop()
        name = request.request_id
        try:
            self._scheduler.add_request(request, now)
        except (InvalidRequestError, OverloadedError):
            self._refused += 1
            self._failed += self._client.abandon(index)
            return
        running = _Running(index, arrival, name, token)
        self._live[name] = running
        self._sampled[name] = running.outputs[True]

    def _execute(self, plan: StepPlan, now: float) -> float:
        requests = plan.requests
        prefill = plan.num_prefill_tokens
        decode = plan.num_tokens - prefill
        if plan.num_preempted:
            self._note_preempted()
            self._steady = None
        pure = not (prefill or plan.num_admitted or self._stopped)
        if pure and self._steady is not None and len(self._steady) == len(requests):
            # The same sequences as in the last step, each one position further.
            outputs = self._steady
            attended = self._attended + decode
        elif pure:
            attended = sum([r.start_position for r in requests]) + decode
            sampled = self._sampled
            outputs = [sampled[r.request_id] for r in requests]
        else:
            attended = attended_positions(requests)
            live = self._live
            outputs = [live[r.request_id].outputs[r.samples] for r in requests]
        self._steady = outputs if pure else None
        self._attended = attended
        seconds = self._server.cost.seconds(prefill, decode, attended)
        self._busy += seconds
        end = now + seconds
        updates = self._scheduler.update(plan, outputs, end)
        flowing = decode if pure else self._note_starts(plan, end)
        if flowing:
            # A decode is in every step, so its last token came at the end of the last one.
            self._gap_seconds.append(end - self._last_end)
            self._gap_counts.append(flowing)
        for update in updates:
            if update.finish_reason is not None:
                self._finish(update.request, end)
                self._steady = None
        self._last, self._last_end = plan, end
        return end

    def _note_preempted(self) -> None:
        if self._last is None:
            return
        for sequence in self._last.sequences:
            if sequence.status is RequestStatus.PREEMPTED and sequence.num_generated_tokens:
                running = self._live[sequence.request_id]
                if running.stopped_at < 0:
                    running.stopped_at = self._last_end
                    self._stopped += 1

    def _note_starts(self, plan: StepPlan, end: float) -> int:
        """First tokens, and tokens after a preemption; returns how many others were sampled."""
        flowing = 0
        for request in plan.requests:
            if not request.samples:
                continue
            running = self._live[request.request_id]
            if request.output_index == 0:
                running.first = end
            elif running.stopped_at < 0:
                flowing += 1
            else:
                self._gap_seconds.append(end - running.stopped_at)
                self._gap_counts.append(1)
                running.stopped_at = -1.0
                self._stopped -= 1
        return flowing

    def _finish(self, sequence: ScheduledRequest, end: float) -> None:
        name = sequence.request_id
        running = self._live.pop(name)
        del self._sampled[name]
        self._finished.append(
            (running.index, running.arrival, running.first, end, sequence.num_generated_tokens)
        )
        self._client.answered(running.index, sequence.tokens, end)

    def _fail(self, name: str) -> None:
        running = self._live.pop(name)
        del self._sampled[name]
        self._stopped -= running.stopped_at >= 0
        self._steady = None
        self._failed += 1 + self._client.abandon(running.index)
