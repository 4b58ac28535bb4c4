"""An executor without a model that checks every KV position, and the outputs it must lead to.

``KvSimulator`` stores, per block and offset, what a real executor's KV would depend on: position,
token, and namespace. Before a step counts, it reads every position of every sequence through the
slot's block table and compares it with the sequence's known tokens, so any error in ids, copies,
reuse or "what has been computed" is reported at the step that makes it.

The next token is a hash of all tokens before it, the seed and the output index. ``expected_output``
computes the same without any scheduler: the outputs of any schedule must equal it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pocket_backend.api import SamplingParams
from pocket_backend.core import (
    ContinuousBatchScheduler,
    ExecuteOutput,
    ExecuteRequest,
    MemoryInfo,
    RequestStatus,
    ScheduledRequest,
    SequenceUpdate,
    StepPlan,
)

VOCAB = 50
EOS = 0


class OracleError(AssertionError):
    """The scheduler asked for something that a real executor would compute wrongly."""


def next_token(tokens: Sequence[int], seed: int, output_index: int) -> int:
    data = array("q", [*tokens, seed % 2**31, output_index]).tobytes()
    return zlib.crc32(data) % VOCAB


def expected_output(
    prompt: Sequence[int], params: SamplingParams, seed: int, limit: int
) -> tuple[list[int], str]:
    """Output tokens and finish reason of a sequence alone in the world.

    ``limit``: tokens (prompt and output) that a sequence may hold.
    """
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    tokens, output = list(prompt), []
    most = params.token_budget(len(prompt), limit)
    while True:
        token = next_token(tokens, seed, len(output))
        tokens.append(token)
        output.append(token)
        if token in stops and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) >= most:
            return output, "length"


@dataclass(frozen=True, slots=True)
class Cell:
    position: int
    token: int
    namespace: object


class KvSimulator:
    """KV storage of ``memory``'s size; see the module."""

    def __init__(self, memory: MemoryInfo) -> None:
        self.memory = memory
        self.cells: list[list[Cell | None]] = [
            [None] * memory.block_size for _ in range(memory.num_blocks)
        ]
        self.tables: dict[int, list[int]] = {}
        self.computed_tokens = 0
        self.copies = 0
        self.failures = 0

    def reset_slot(self, slot: int) -> None:
        self.tables.pop(slot, None)

    def execute(
        self, plan: StepPlan, *, fail: bool = False, errors: frozenset[str] = frozenset()
    ) -> list[ExecuteOutput]:
        """Run a step. ``errors``: these requests fail alone. ``fail``: the step raises, in turns
        before anything is done and after writing garbage."""
        requests = plan.requests
        self._check_step(requests)
        if fail:
            self.failures += 1
            if self.failures % 2:
                raise RuntimeError("the device fell off the bus")
        for request in requests:
            if request.is_new:
                self.tables[request.slot_id] = list(request.block_ids)
            elif request.slot_id not in self.tables:
                raise OracleError(f"slot {request.slot_id} has no table")
            else:
                self.tables[request.slot_id].extend(request.block_ids)
        for request in requests:
            for source, target in request.block_copies:
                if not request.is_new or target not in request.block_ids:
                    raise OracleError(f"{request.request_id}: copy to {target}, not its block")
                if not any(source in table for table in self.tables.values()):
                    raise OracleError(f"{request.request_id}: copy from {source}, nobody's block")
                self.cells[target] = list(self.cells[source])
                self.copies += 1
        for request, sequence in zip(requests, plan.sequences, strict=True):
            self._write(request, sequence, garbage=fail)
        if fail:
            raise RuntimeError("the device wrote garbage")
        return [
            self._output(request, sequence, request.request_id in errors)
            for request, sequence in zip(requests, plan.sequences, strict=True)
        ]

    def _check_step(self, requests: Sequence[ExecuteRequest]) -> None:
        slots = [r.slot_id for r in requests]
        if len(set(slots)) != len(slots):
            raise OracleError(f"a slot twice in one step: {slots}")
        if len({r.request_id for r in requests}) != len(requests):
            raise OracleError("a sequence twice in one step")
        total = sum(len(r.token_ids) for r in requests)
        if not 0 < total <= self.memory.max_batch_tokens:
            raise OracleError(f"{total} tokens in a step of {self.memory.max_batch_tokens}")

    def _write(self, request: ExecuteRequest, sequence: ScheduledRequest, *, garbage: bool) -> None:
        size = self.memory.block_size
        table = self.tables[request.slot_id]
        if len(set(table)) != len(table):
            raise OracleError(f"{request.request_id}: a block twice in the table {table}")
        for offset, token in enumerate(request.token_ids):
            position = request.start_position + offset
            if position // size >= len(table):
                raise OracleError(f"{request.request_id}: position {position} beyond its table")
            block = table[position // size]
            for slot, other in self.tables.items():
                if slot != request.slot_id and block in other:
                    raise OracleError(f"{request.request_id} writes block {block} of slot {slot}")
            cell = None if garbage else Cell(position, token, sequence.namespace)
            self.cells[block][position % size] = cell

    def _output(
        self, request: ExecuteRequest, sequence: ScheduledRequest, error: bool
    ) -> ExecuteOutput:
        name = request.request_id
        end = request.start_position + len(request.token_ids)
        table, size = self.tables[request.slot_id], self.memory.block_size
        for position in range(end):
            cell = self.cells[table[position // size]][position % size]
            want = Cell(position, sequence.tokens[position], sequence.namespace)
            if cell != want:
                raise OracleError(f"{name} reads {cell} at {position}, should be {want}")
        self.computed_tokens += len(request.token_ids)
        if error:
            return ExecuteOutput(name, None, finish_reason="error", error="told to fail")
        if request.samples != (end == len(sequence.tokens)):
            raise OracleError(f"{name}: samples={request.samples} at {end}")
        if not request.samples:
            return ExecuteOutput(name, None)
        if request.output_index != len(sequence.tokens) - sequence.num_prompt_tokens:
            raise OracleError(f"{name}: output index {request.output_index}")
        token = next_token(sequence.tokens[:end], request.seed, request.output_index)
        return ExecuteOutput(name, token)


@dataclass
class Run:
    """A scheduler with its simulator, stepped in virtual time, with everything it delivered."""

    scheduler: ContinuousBatchScheduler
    kv: KvSimulator = field(init=False)
    now: float = 0.0
    outputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], SequenceUpdate] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    keep_plans: bool = False
    simulator: type[KvSimulator] = KvSimulator

    def __post_init__(self) -> None:
        self.kv = self.simulator(self.scheduler.memory)

    def step(
        self,
        *,
        errors: frozenset[str] = frozenset(),
        fail: bool = False,
        during: Callable[[StepPlan], None] | None = None,
    ) -> StepPlan | None:
        """schedule, execute, ``during`` (a cancellation, say), update."""
        self.now += 0.001
        plan = self.scheduler.schedule(self.now)
        if plan is None:
            return None
        if self.keep_plans:
            self.plans.append(plan)
        self._deliver(plan.finished)
        for slot in plan.reset_slots:
            self.kv.reset_slot(slot)
        if not plan.requests:
            return plan
        try:
            results = self.kv.execute(plan, fail=fail, errors=errors)
        except RuntimeError as error:
            if during is not None:
                during(plan)
            self._deliver(self.scheduler.fail_step(plan, error))
            return plan
        if during is not None:
            during(plan)
        self._deliver(self.scheduler.update(plan, results, self.now))
        return plan

    def drain(self, max_steps: int = 100_000) -> int:
        """Step until everything has ended; returns the number of steps."""
        for count in range(max_steps):
            if not self.scheduler.has_work():
                return count
            plan = self.step()
            if plan is None:
                raise OracleError(f"work is waiting and nothing runs: {self.scheduler.stats()}")
        raise OracleError(f"not finished after {max_steps} steps: {self.scheduler.stats()}")

    def _deliver(self, updates: Sequence[SequenceUpdate]) -> None:
        for update in updates:
            key = (update.request_id, update.choice_index)
            if key in self.ends:
                raise OracleError(f"news of {key} after its end")
            self.outputs.setdefault(key, []).extend(update.token_ids)
            if update.finish_reason is not None:
                if update.request.status is not RequestStatus.FINISHED:
                    raise OracleError(f"{key} ended but is {update.request.status}")
                self.ends[key] = update


def memory(
    num_blocks: int = 64,
    block_size: int = 4,
    max_slots: int = 8,
    max_context: int = 1 << 16,
    max_batch_tokens: int = 32,
) -> MemoryInfo:
    return MemoryInfo(num_blocks, block_size, max_slots, max_context, max_batch_tokens, VOCAB)
