"""What sequences do to their logits before a token is chosen: steps 1 to 6 of docs/sampling.md.

Owner of the penalties' history, by slot. All rows of a step are edited together: their ids lie in
one flat index, so that a step costs a handful of operations however many rows have options.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pocket_backend.api import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pocket_backend.api import SamplingParams
    from pocket_backend.core.step import ExecuteRequest

_LEAST_REPETITION_PENALTY = 1e-30
"""Smaller ones are 0 in float32."""
_LARGEST = float(np.finfo(np.float32).max)
_INFINITY = float("inf")


class _History:
    """Distinct tokens of a sequence, and how often each is in the output."""

    def __init__(self, vocab: int) -> None:
        self._place = np.full(vocab, -1, dtype=np.int64)
        self._tokens = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)
        self._distinct = 0
        self.length = 0
        """Tokens taken in, prompt included."""

    def add(self, token: int, count: int) -> None:
        place = self._place[token]
        if place < 0:
            place = self._place[token] = self._distinct
            if place == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
            self._tokens[place], self._counts[place] = token, 0
            self._distinct += 1
        self._counts[place] += count

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._tokens[: self._distinct]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self._distinct]


@dataclass(slots=True)
class _Edits:
    params: SamplingParams
    bias_ids: NDArray[np.int64]
    bias: NDArray[np.float32]
    banned: NDArray[np.int64]
    ending: NDArray[np.int64]
    allowed: Tensor | None
    """Bool [vocab]."""
    history: _History | None


class TorchEdits:
    """Engine thread only.

    Args:
        slots: number of slots.
        vocab: ids that may be sampled; edits of others are ignored.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._edits: list[_Edits | None] = [None] * slots

    def start(self, request: ExecuteRequest) -> None:
        """The sequence enters its slot, with all tokens known so far.

        Raises:
            EngineError: its penalties need the known tokens and they did not come.
        """
        params = request.sampling_params
        self._edits[request.slot_id] = None
        early = request.output_index < params.min_tokens
        ending = request.ending_ids if early else frozenset()
        masked = params.allowed_token_ids is not None
        if not (
            params.has_penalties or ending or params.logit_bias or params.bad_token_ids or masked
        ):
            return
        bias = {t: b for t, b in params.logit_bias.items() if t < self._vocab}
        self._edits[request.slot_id] = _Edits(
            params=params,
            bias_ids=self._ids(bias),
            bias=np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
            banned=self._ids(params.bad_token_ids),
            ending=self._ids(ending),
            allowed=self._mask(params.allowed_token_ids),
            history=self._history(request) if params.has_penalties else None,
        )

    def advance(self, request: ExecuteRequest) -> None:
        """Take in tokens that this step computes and the history does not have yet.

        Raises:
            EngineError: tokens are missing in between.
        """
        edits = self._edits[request.slot_id]
        if edits is None or edits.history is None:
            return
        history = edits.history
        known = history.length - request.start_position
        if known < 0:
            raise EngineError(
                f"request {request.request_id!r}: tokens {history.length} to "
                f"{request.start_position - 1} never came"
            )
        for token in request.token_ids[known:]:
            history.length += 1
            if token < self._vocab:
                history.add(token, 1)

    def drop(self, slot: int) -> None:
        """The sequence has left."""
        self._edits[slot] = None

    def concern(self, requests: Sequence[ExecuteRequest]) -> list[bool]:
        """Which rows have options."""
        return [self._edits[request.slot_id] is not None for request in requests]

    def apply(self, logits: Tensor, requests: Sequence[ExecuteRequest]) -> None:
        """Edit ``logits`` (float32 [rows, vocab], contiguous) in place, one row per request."""
        rows = [
            (row, request, edits)
            for row, request in enumerate(requests)
            if (edits := self._edits[request.slot_id]) is not None
        ]
        flat = logits.view(-1)
        self._add_bias(flat, [(row, edits) for row, _, edits in rows if len(edits.bias_ids)])
        self._penalise(flat, [(row, edits) for row, _, edits in rows if edits.history])
        banned = [(row, edits.banned) for row, _, edits in rows] + [
            (row, edits.ending)
            for row, request, edits in rows
            if request.output_index < edits.params.min_tokens
        ]
        index = self._flat_index(banned)
        if len(index):
            flat[index] = -_INFINITY
        for row, _, edits in rows:
            if edits.allowed is not None:
                logits[row].masked_fill_(~edits.allowed, -_INFINITY)

    def _add_bias(self, flat: Tensor, rows: list[tuple[int, _Edits]]) -> None:
        if not rows:
            return
        index = self._flat_index([(row, edits.bias_ids) for row, edits in rows])
        before = flat[index]
        bias = self._tensor(np.concatenate([edits.bias for _, edits in rows]))
        flat[index] = _bounded(before, before + bias)

    def _penalise(self, flat: Tensor, rows: list[tuple[int, _Edits]]) -> None:
        if not rows:
            return
        histories = [(row, edits.params, edits.history) for row, edits in rows if edits.history]
        index = self._flat_index([(row, history.tokens) for row, _, history in histories])
        counts = self._tensor(np.concatenate([history.counts for _, _, history in histories]))
        sizes = [len(history.tokens) for _, _, history in histories]
        params = [p for _, p, _ in histories]

        def spread(values: Iterable[float]) -> Tensor:
            return self._tensor(np.repeat(np.array(list(values), dtype=np.float32), sizes))

        repetition = spread(max(p.repetition_penalty, _LEAST_REPETITION_PENALTY) for p in params)
        frequency = spread(p.frequency_penalty for p in params)
        presence = spread(p.presence_penalty for p in params)
        x = flat[index]
        x = _bounded(x, torch.where(x > 0, x / repetition, x * repetition))
        x = _bounded(x, x - frequency * counts)
        flat[index] = _bounded(x, x - presence * (counts > 0))

    def _history(self, request: ExecuteRequest) -> _History:
        known = request.known_tokens
        if known is None:
            raise EngineError(
                f"request {request.request_id!r}: penalties need known_tokens with is_new"
            )
        history = _History(self._vocab)
        prompt = len(known) - request.output_index
        history.length = len(known)
        # Nothing but a repetition penalty looks at the prompt.
        begin = 0 if request.sampling_params.repetition_penalty != 1.0 else prompt
        for position in range(begin, len(known)):
            token = int(known[position])
            if token < self._vocab:
                history.add(token, int(position >= prompt))
        return history

    def _mask(self, allowed: Sequence[int] | None) -> Tensor | None:
        if allowed is None:
            return None
        mask = torch.zeros(self._vocab, dtype=torch.bool, device=self._device)
        mask[self._tensor(self._ids(allowed))] = True
        return mask

    def _ids(self, tokens: Iterable[int]) -> NDArray[np.int64]:
        return np.array([token for token in tokens if token < self._vocab], dtype=np.int64)

    def _flat_index(self, rows: Sequence[tuple[int, NDArray[np.int64]]]) -> Tensor:
        parts = [row * self._vocab + ids for row, ids in rows]
        return self._tensor(np.concatenate(parts) if parts else np.empty(0, dtype=np.int64))

    def _tensor(self, values: NDArray[np.float32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _bounded(before: Tensor, after: Tensor) -> Tensor:
    """A division by a tiny penalty may overflow, and +inf marks a broken row."""
    overflowed = (after == _INFINITY) & (before < _INFINITY)
    return after.masked_fill(overflowed, _LARGEST)
