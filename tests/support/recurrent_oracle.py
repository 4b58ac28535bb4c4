"""``KvSimulator`` for models with recurrent state: every state is known by the tokens it is of.

A slot's state, and a snapshot's content, is (namespace, tokens taken in so far); None: lost. Before
a step counts, each sequence's state must be that of exactly the tokens before its position.
"""

from __future__ import annotations

from array import array

from scheduler_oracle import KvSimulator, OracleError

from pocket_backend.core import ContinuousBatchScheduler, ExecuteOutput, MemoryInfo, StepPlan
from pocket_backend.kv import RecurrentBlockManager
from pocket_backend.kv.radix import CacheNode, Root

State = tuple[object, tuple[int, ...]] | None


class RecurrentSimulator(KvSimulator):
    def __init__(self, memory: MemoryInfo) -> None:
        super().__init__(memory)
        self.states: dict[int, State] = {}
        self.snapshots: list[State] = [None] * memory.num_state_snapshots
        self.loads = self.saves = 0

    def reset_slot(self, slot: int) -> None:
        super().reset_slot(slot)
        self.states.pop(slot, None)

    def execute(
        self, plan: StepPlan, *, fail: bool = False, errors: frozenset[str] = frozenset()
    ) -> list[ExecuteOutput]:
        self._load(plan)
        try:
            outputs = super().execute(plan, fail=fail, errors=errors)
        except RuntimeError:
            for request in plan.requests:
                self.states[request.slot_id] = None
                if request.state_target is not None:
                    self.snapshots[request.state_target] = None
            raise
        for request in plan.requests:
            state = self.states[request.slot_id]
            assert state is not None
            self.states[request.slot_id] = (state[0], state[1] + request.token_ids)
        for request in plan.requests:
            if request.state_target is not None:
                self.saves += 1
                self.snapshots[request.state_target] = self.states[request.slot_id]
        return outputs

    def _load(self, plan: StepPlan) -> None:
        targets = [r.state_target for r in plan.requests if r.state_target is not None]
        if len(set(targets)) != len(targets):
            raise OracleError(f"two sequences write one snapshot: {targets}")
        for request, sequence in zip(plan.requests, plan.sequences, strict=True):
            begin = request.start_position
            if request.is_new:
                source = request.state_source
                self.loads += source is not None
                self.states[request.slot_id] = (
                    (sequence.namespace, ()) if source is None else self.snapshots[source]
                )
            elif request.state_source is not None:
                raise OracleError(f"{request.request_id} goes on and loads a snapshot")
            want = (sequence.namespace, tuple(sequence.tokens[:begin]))
            if self.states[request.slot_id] != want:
                raise OracleError(
                    f"{request.request_id} at {begin}: state {self.states[request.slot_id]}"
                )


def node_state(node: CacheNode) -> State:
    """What a snapshot of ``node`` has to hold."""
    labels = []
    at: CacheNode | None = node
    while at is not None and not isinstance(at, Root):
        labels.append(at.key)
        at = at.parent
    assert isinstance(at, Root)
    return at.namespace, tuple(array("i", b"".join(reversed(labels))))


def check_snapshots(scheduler: ContinuousBatchScheduler, simulator: RecurrentSimulator) -> int:
    """Every snapshot that is kept holds the state of its node's tokens; returns how many are."""
    blocks = scheduler._life.blocks
    assert isinstance(blocks, RecurrentBlockManager)
    kept = 0
    for node in blocks._cache.nodes():
        snapshot = blocks.snapshots.of(node)
        if snapshot is not None:
            kept += 1
            assert simulator.snapshots[snapshot] == node_state(node)
    assert kept == blocks.snapshots.num_kept <= scheduler.memory.num_state_snapshots
    return kept
