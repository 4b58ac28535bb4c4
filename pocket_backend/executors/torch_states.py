"""Storage of recurrent and convolution states: one row per slot, then one per snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pocket_backend.api import EngineError

if TYPE_CHECKING:
    from pocket_backend.core.step import ExecuteRequest

StateKey = tuple[str, int]
"""Kind of a state within a layer (``conv``, ``recurrent``) and its number."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state of one sequence in one layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


LayerStates = Mapping[StateKey, StateShape]


def state_bytes(shapes: Mapping[int, LayerStates]) -> int:
    """Bytes of one sequence's states in all layers."""
    return sum(shape.nbytes for states in shapes.values() for shape in states.values())


@dataclass(frozen=True, slots=True)
class StateRows:
    """Which rows of a packed step belong to which slots.

    Rows ``0 .. len(decodes) - 1`` are one token each; each chunk is (slot, begin, end, whether the
    sequence begins with it).
    """

    decodes: Tensor
    """int64 [decodes]: slots."""
    chunks: Sequence[tuple[int, int, int, bool]]


class StateStorage:
    """Tensors ``[slots + snapshots, ...]`` per layer and kind.

    Args:
        shapes: by layer index.
        slots, snapshots: how many sequences and saved states.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerStates],
        slots: int,
        snapshots: int,
        device: torch.device,
    ) -> None:
        self._slots, self._snapshots = slots, snapshots
        self._device = device
        self._tensors = {
            layer: {
                key: torch.zeros(
                    (slots + snapshots, *shape.shape), dtype=shape.dtype, device=device
                )
                for key, shape in states.items()
            }
            for layer, states in shapes.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._all())

    def layer(self, layer: int) -> Mapping[StateKey, Tensor]:
        """The tensors of a layer; rows below the number of slots are slots."""
        return self._tensors[layer]

    def begin(self, requests: Sequence[ExecuteRequest]) -> None:
        """Set the slots of new sequences to zero or to their snapshot.

        Raises:
            EngineError: a snapshot is out of range, or a sequence goes on without a state.
        """
        fresh: list[int] = []
        loads: list[tuple[int, int]] = []
        for request in requests:
            for snapshot in (request.state_source, request.state_target):
                if snapshot is not None and not 0 <= snapshot < self._snapshots:
                    raise EngineError(
                        f"request {request.request_id!r}: snapshot {snapshot} is not from 0 to "
                        f"{self._snapshots - 1}"
                    )
            if not request.is_new:
                continue
            if request.state_source is not None:
                loads.append((self._slots + request.state_source, request.slot_id))
            elif request.start_position:
                raise EngineError(
                    f"request {request.request_id!r} starts at {request.start_position} without "
                    "a state"
                )
            else:
                fresh.append(request.slot_id)
        if fresh:
            rows = torch.tensor(fresh, device=self._device)
            for tensor in self._all():
                tensor.index_fill_(0, rows, 0)
        self._copy(loads)

    def save(self, requests: Sequence[ExecuteRequest]) -> None:
        """Copy the slots' states to the targets that the requests name."""
        self._copy(
            [
                (request.slot_id, self._slots + request.state_target)
                for request in requests
                if request.state_target is not None
            ]
        )

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        # Row by row: each is a contiguous piece, and there is rarely more than one in a step.
        for source, target in pairs:
            for tensor in self._all():
                tensor[target].copy_(tensor[source])

    def _all(self) -> list[Tensor]:
        return [tensor for states in self._tensors.values() for tensor in states.values()]
