"""One step's packed batch: which row is which token, where it is stored, and what it sees.

Rows are ordered for attention, not as the scheduler listed them: sequences with one token first
(decodes), grouped by length, then the chunks. Everything that depends on the layer only through its
window is computed once per step and window, and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pocket_backend.executors.torch_states import StateRows

if TYPE_CHECKING:
    from pocket_backend.core.step import ExecuteRequest
    from pocket_backend.executors.slot_tables import SlotTables

_SMALLEST_GROUP_BLOCKS = 32
"""Sequences of up to so many blocks are attended together; longer ones with those of about their
length. Padding then at most doubles what is read."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one row each, attended in one operation."""

    begin: int
    end: int
    """Rows ``begin .. end - 1`` of the batch."""
    blocks: Tensor
    """int64 [sequences, blocks]."""
    mask: Tensor
    """Float [sequences, 1, 1, keys], 0 or -inf."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with several rows."""

    begin: int
    end: int
    blocks: Tensor | None
    """int64 [1, blocks]; None: everything that the rows see is in this batch."""
    mask: Tensor | None
    """Float [1, 1, rows, keys], 0 or -inf; None: causal."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the rows see in a layer with a given window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


@dataclass(slots=True)
class _Part:
    """A request's rows."""

    index: int
    slot: int
    start: int
    length: int
    begin: int = 0


class PackedStep:
    """The batch. ``tokens``, ``positions`` and ``places`` are int64 [rows].

    Args:
        requests: as the scheduler gave them.
        tables: already advanced by ``requests``.
        dtype: of masks: the model's activations.
    """

    def __init__(
        self,
        requests: Sequence[ExecuteRequest],
        tables: SlotTables,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._tables, self._size = tables, block_size
        self._device, self._dtype = device, dtype
        self._layouts: dict[int | None, Layout] = {}
        parts = [
            _Part(i, request.slot_id, request.start_position, len(request.token_ids))
            for i, request in enumerate(requests)
        ]
        parts.sort(key=lambda part: (part.length > 1, self._bucket(part), part.index))
        tokens: list[int] = []
        for part in parts:
            part.begin = len(tokens)
            tokens += requests[part.index].token_ids
        self._decodes = [part for part in parts if part.length == 1]
        self._chunks = [part for part in parts if part.length > 1]
        positions = [np.arange(p.start, p.start + p.length) for p in parts]
        places = [tables.places(p.slot, p.start, p.start + p.length) for p in parts]
        self.tokens = torch.tensor(tokens, device=device)
        self.positions = torch.from_numpy(np.concatenate(positions)).to(device)
        self.places = torch.from_numpy(np.concatenate(places)).to(device)
        last = {part.index: part.begin + part.length - 1 for part in parts}
        wanted = [last[i] for i, request in enumerate(requests) if request.samples]
        self.sampled_rows = torch.tensor(wanted, dtype=torch.int64, device=device)
        """Rows whose logits are wanted, in the scheduler's order."""

    def state_rows(self) -> StateRows:
        """Which rows belong to which slots, for layers that keep a state per slot."""
        slots = [part.slot for part in self._decodes]
        return StateRows(
            decodes=torch.tensor(slots, dtype=torch.int64, device=self._device),
            chunks=[(p.slot, p.begin, p.begin + p.length, p.start == 0) for p in self._chunks],
        )

    def layout(self, window: int | None) -> Layout:
        """``window``: how many tokens a token sees, itself included; None: all before it."""
        found = self._layouts.get(window)
        if found is None:
            chunks = tuple([self._chunk(part, window) for part in self._chunks])
            found = self._layouts[window] = Layout(tuple(self._groups(window)), chunks)
        return found

    def _bucket(self, part: _Part) -> int:
        blocks = -(-(part.start + part.length) // self._size)
        return 0 if blocks <= _SMALLEST_GROUP_BLOCKS else (blocks - 1).bit_length()

    def _groups(self, window: int | None) -> list[DecodeGroup]:
        groups: list[DecodeGroup] = []
        begin = 0
        while begin < len(self._decodes):
            bucket = self._bucket(self._decodes[begin])
            end = begin + 1
            while end < len(self._decodes) and self._bucket(self._decodes[end]) == bucket:
                end += 1
            groups.append(self._group(self._decodes[begin:end], window))
            begin = end
        return groups

    def _group(self, parts: Sequence[_Part], window: int | None) -> DecodeGroup:
        slots = np.array([part.slot for part in parts])
        lengths = np.array([part.start + 1 for part in parts])
        oldest = np.zeros_like(lengths) if window is None else np.maximum(0, lengths - window)
        first = oldest // self._size
        width = int((-(-lengths // self._size) - first).max())
        blocks = self._tables.padded(slots, first, width)
        keys = first[:, None] * self._size + np.arange(width * self._size)
        seen = (keys < lengths[:, None]) & (keys >= oldest[:, None])
        return DecodeGroup(
            begin=parts[0].begin,
            end=parts[-1].begin + 1,
            blocks=torch.from_numpy(blocks).to(self._device),
            mask=self._additive(seen)[:, None, None, :],
        )

    def _chunk(self, part: _Part, window: int | None) -> Chunk:
        rows, end = part.begin + part.length, part.start + part.length
        if part.start == 0 and (window is None or end <= window):
            return Chunk(part.begin, rows, None, None)
        queries = np.arange(part.start, end)[:, None]
        oldest = 0 if window is None else max(0, part.start + 1 - window)
        first = oldest // self._size
        width = -(-end // self._size) - first
        blocks = self._tables.padded(np.array([part.slot]), np.array([first]), width)
        keys = first * self._size + np.arange(width * self._size)[None, :]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        return Chunk(
            part.begin,
            rows,
            torch.from_numpy(blocks).to(self._device),
            self._additive(seen)[None, None],
        )

    def _additive(self, seen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Tensor:
        mask = torch.from_numpy(seen).to(self._device)
        return torch.zeros(mask.shape, dtype=self._dtype, device=self._device).masked_fill_(
            ~mask, float("-inf")
        )
