"""Recurrent states of the C++ engine's slots: how many snapshots, and the copies of a step.

Models without such states have no snapshots, and no request names one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pocket_backend.api import EngineError
from pocket_backend.core.step import ExecuteRequest
from pocket_backend.executors.cpp_options import CppEngineOptions
from pocket_backend.executors.state_options import default_snapshots, snapshot_interval


class PoolSizes(NamedTuple):
    """Places for KV blocks and snapshots, and the tokens between two snapshots of a sequence."""

    blocks: int
    snapshots: int
    snapshot_interval: int


def pool_sizes(
    options: CppEngineOptions, context: int, info: Mapping[str, Any], available: int | None
) -> PoolSizes:
    """What ``options`` leave open is shared out of the memory that the slots' own states leave.

    Args:
        context: tokens that a sequence may hold.
        info: the engine's ``inspect_model``.
        available: bytes of memory that may be taken; None: unknown.
    """
    state, block = info["state_bytes"], info["kv_bytes_per_block"]
    if available is not None:
        available = max(0, available - options.max_batch_size * state)
    blocks = options.blocks(context, block, available)
    if not state:
        return PoolSizes(blocks, 0, 0)
    snapshots = options.max_state_snapshots
    if snapshots is None:
        snapshots = default_snapshots(state, blocks * block, available)
    interval = snapshot_interval(options.state_snapshot_interval_tokens, on_cpu=True)
    return PoolSizes(blocks, snapshots, interval)


class SlotStates:
    """Carries out ``state_source`` and ``state_target`` of a step's requests.

    Thread contract: the engine thread's. Raises EngineError: a snapshot is out of range, or holds
    nothing.
    """

    def __init__(self, native: Any, engine: Any) -> None:
        self._native, self._engine = native, engine

    def load(self, requests: Sequence[ExecuteRequest]) -> None:
        """Before the step. Without a source the engine starts from zeros, at position 0 only."""
        pairs = [(r.state_source, r.slot_id) for r in requests if r.state_source is not None]
        self._move(self._engine.load_states, pairs)

    def save(self, requests: Sequence[ExecuteRequest]) -> None:
        """After the step."""
        pairs = [(r.slot_id, r.state_target) for r in requests if r.state_target is not None]
        self._move(self._engine.save_states, pairs)

    def _move(self, move: Callable[[Any, Any], None], pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        sources, targets = np.array(pairs, dtype=np.int32).T
        try:
            move(sources.copy(), targets.copy())
        except self._native.EngineError as error:
            raise EngineError(str(error)) from error
