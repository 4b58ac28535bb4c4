"""The recurrent state of the fake executor: a number that every computed token changes.

It stands for what no block holds. A slot that goes on from a wrong state, say one that was saved
too late or loaded from another snapshot, gives other tokens than the sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from pocket_backend.api import EngineError
from pocket_backend.core.step import ExecuteRequest

STATE_BYTES = 8
_ZERO = 1
_FACTOR, _MODULUS = 1_000_003, 2**61 - 1
_GARBAGE = -1


class FakeStates:
    """One number per slot and snapshot. A breach of the contract of ``core/step.py`` raises."""

    def __init__(self, num_snapshots: int) -> None:
        self._slots: dict[int, int] = {}
        self._snapshots: list[int] = [_GARBAGE] * num_snapshots

    def begin(self, requests: Sequence[ExecuteRequest]) -> None:
        """Read all sources of a step.

        Raises:
            EngineError: a snapshot is out of range or holds nothing, or a sequence goes on without
                a state.
        """
        for request in requests:
            name, source = request.request_id, request.state_source
            for snapshot in (source, request.state_target):
                if snapshot is not None and not 0 <= snapshot < len(self._snapshots):
                    raise EngineError(f"request {name!r}: snapshot {snapshot} is out of range")
            if not request.is_new:
                state = self._slots.get(request.slot_id)
                if source is not None or state is None:
                    raise EngineError(f"request {name!r} goes on: slot state {state}, not {source}")
            elif source is None:
                if request.start_position:
                    raise EngineError(
                        f"request {name!r} starts at {request.start_position} without a state"
                    )
                state = _ZERO
            else:
                state = self._snapshots[source]
            if state == _GARBAGE:
                raise EngineError(f"request {name!r} goes on from a state that was lost")
            self._slots[request.slot_id] = state

    def advance(self, request: ExecuteRequest) -> bytes:
        """Take in the request's tokens; returns the state as bytes."""
        state = self._slots[request.slot_id]
        for token in request.token_ids:
            state = (state * _FACTOR + token + 1) % _MODULUS
        self._slots[request.slot_id] = state
        return state.to_bytes(STATE_BYTES, "little")

    def save(self, request: ExecuteRequest) -> None:
        """Write the request's target, if it has one."""
        if request.state_target is not None:
            self._snapshots[request.state_target] = self._slots[request.slot_id]

    def lose(self, requests: Sequence[ExecuteRequest]) -> None:
        """The step failed: nothing that it changed may be relied on."""
        for request in requests:
            self._slots[request.slot_id] = _GARBAGE
            if request.state_target is not None:
                self._snapshots[request.state_target] = _GARBAGE

    def reset(self, slot: int) -> None:
        self._slots.pop(slot, None)
