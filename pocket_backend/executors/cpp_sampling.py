"""What sequences in slots do to their logits: the native ``LogitEdits`` per slot.

Owner of the penalties' history. A sequence gets its object when it enters a slot and asks for
something; rows without options cost one check per step. The history is rebuilt whenever the
scheduler sends a sequence anew (admission, resumption, a repeated step) and grows by the tokens of
later steps, so it never depends on what a failed step did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pocket_backend.api import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pocket_backend.core.step import ExecuteRequest

_LEAST_REPETITION_PENALTY = 1e-30
"""Smaller ones are 0 in float32, which the engine refuses."""
_WORD_BITS = 32


class SlotEdits:
    """Engine thread only.

    Args:
        native: the native module.
        slots: number of slots.
        model_vocab: logits per row.
        token_vocab: ids that may be sampled.
    """

    def __init__(self, native: Any, slots: int, model_vocab: int, token_vocab: int) -> None:
        self._native = native
        self._model_vocab = model_vocab
        self._token_vocab = token_vocab
        self._edits: list[Any | None] = [None] * slots
        self._masks: list[NDArray[np.int32] | None] = [None] * slots
        self._counting: set[int] = set()
        """Slots whose edits have a history to keep."""
        self._occupied: set[int] = set()
        """Slots with edits or a mask."""

    def start(self, request: ExecuteRequest) -> None:
        """The sequence enters its slot, with all tokens known so far.

        Raises:
            EngineError: its penalties need the known tokens and they did not come.
        """
        slot = request.slot_id
        self.drop(slot)
        params = request.sampling_params
        allowed = params.allowed_token_ids
        if allowed is not None:
            self._masks[slot] = allowed_words(allowed, self._token_vocab)
            self._occupied.add(slot)
        ending = request.ending_ids if request.output_index < params.min_tokens else frozenset()
        penalties = params.has_penalties
        banned = {*params.bad_token_ids, *request.never_ids}
        if not (penalties or ending or params.logit_bias or banned):
            return
        bias = params.logit_bias
        edits = self._native.LogitEdits(
            self._model_vocab,
            repetition_penalty=max(params.repetition_penalty, _LEAST_REPETITION_PENALTY),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias_tokens=_ids(bias),
            bias_values=np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
            banned=_ids([token for token in banned if token < self._model_vocab]),
            ending=_ids([token for token in ending if token < self._token_vocab]),
            min_tokens=params.min_tokens,
        )
        if penalties:
            known = request.known_tokens
            if known is None:
                raise EngineError(
                    f"request {request.request_id!r}: penalties need known_tokens with is_new"
                )
            # A copy: the scheduler's array could not grow while something refers to its memory.
            tokens = np.array(known, dtype=np.int32)
            edits.reset_history(tokens, num_prompt=len(tokens) - request.output_index)
            self._counting.add(slot)
        self._edits[slot] = edits
        self._occupied.add(slot)

    def _advance(self, request: ExecuteRequest) -> None:
        """Take in tokens that this step computes and the history does not have yet.

        Raises:
            EngineError: tokens are missing in between.
        """
        edits: Any = self._edits[request.slot_id]
        known = edits.length - request.start_position
        if known < 0:
            raise EngineError(
                f"request {request.request_id!r}: tokens {edits.length} to "
                f"{request.start_position - 1} never came"
            )
        for token in request.token_ids[known:]:
            edits.append(token)

    def drop(self, slot: int) -> None:
        """The sequence has left."""
        if slot in self._occupied:
            self._edits[slot] = self._masks[slot] = None
            self._occupied.discard(slot)
            self._counting.discard(slot)

    def rows(
        self, requests: Sequence[ExecuteRequest], sampled: Sequence[ExecuteRequest]
    ) -> dict[str, list[Any]]:
        """The engine's arguments for the rows of ``sampled``, those of ``requests`` that sample;
        empty if no row has options. Histories take in what this step computes.

        Raises:
            EngineError: tokens are missing between a history and this step.
        """
        if self._counting:
            for request in requests:
                if request.slot_id in self._counting:
                    self._advance(request)
        if not self._occupied and not any(request.banned_ids for request in sampled):
            return {}
        return {
            "edits": [self._edits[request.slot_id] for request in sampled],
            "allowed": [
                self._without(self._masks[request.slot_id], request.banned_ids)
                if request.banned_ids
                else self._masks[request.slot_id]
                for request in sampled
            ],
        }

    def _without(self, mask: NDArray[np.int32] | None, banned: Sequence[int]) -> NDArray[np.int32]:
        """``mask`` (None: all ids) without these ids."""
        if mask is None:
            mask = np.full(-(-self._token_vocab // _WORD_BITS), -1, dtype=np.int32)
        return mask & ~allowed_words(
            [token for token in banned if token < self._token_vocab], self._token_vocab
        )


def allowed_words(tokens: Sequence[int], vocab: int) -> NDArray[np.int32]:
    """A bit mask over ``vocab`` ids: token t is bit t % 32 of word t // 32."""
    bits = np.zeros(-(-vocab // _WORD_BITS) * _WORD_BITS, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _ids(tokens: Any) -> NDArray[np.int32]:
    return np.fromiter(tokens, dtype=np.int32, count=len(tokens))
