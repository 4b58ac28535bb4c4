"""Log probabilities of prompts: extra rows of a step whose token is not drawn but given.

The engine reports the log probability of whatever a row samples, under the raw logits. A row whose
mask allows one token samples that one: the prompt's next token. So a prompt is scored by the same
call, kernels and bits as an output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pocket_backend.api import EngineError
from pocket_backend.core.step import TokenLogprobs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pocket_backend.core.step import ExecuteRequest

_WORD_BITS = 32
_NEUTRAL: dict[str, float] = {
    "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0, "token_index": 0,
}  # fmt: skip

StepKeywords = dict[str, Any]


class PromptScorer:
    """Engine thread only. Keeps the prompts of the sequences that asked."""

    def __init__(self, vocab: int) -> None:
        self._words = -(-vocab // _WORD_BITS)
        self._prompts: dict[int, NDArray[np.int32]] = {}
        """By slot."""

    def start(self, request: ExecuteRequest) -> None:
        """The sequence enters its slot.

        Raises:
            EngineError: the known tokens did not come.
        """
        self.drop(request.slot_id)
        if request.sampling_params.prompt_logprobs is None:
            return
        if request.known_tokens is None:
            raise EngineError(
                f"request {request.request_id!r}: prompt_logprobs need known_tokens with is_new"
            )
        known = np.array(request.known_tokens, dtype=np.int32)
        self._prompts[request.slot_id] = known[: len(known) - request.output_index]

    @property
    def active(self) -> bool:
        """Whether a sequence in some slot has asked."""
        return bool(self._prompts)

    def drop(self, slot: int) -> None:
        """The sequence has left."""
        self._prompts.pop(slot, None)

    def add_rows(
        self, requests: Sequence[ExecuteRequest], sampled: int, arguments: StepKeywords
    ) -> list[tuple[int, int, int]]:
        """Append rows to the engine's arguments; returns (index of the request, first row, number).

        ``sampled``: rows that are there already.
        """
        parts: list[tuple[int, int, int]] = []
        rows: list[NDArray[np.int32]] = []
        targets: list[NDArray[np.int32]] = []
        tops: list[int] = []
        offsets = arguments["sequence_offsets"]
        row = sampled
        for index, request in enumerate(requests):
            prompt = self._prompts.get(request.slot_id)
            if prompt is None:
                continue
            first = request.start_position + 1
            wanted = prompt[first : first + len(request.token_ids)]
            if not len(wanted):
                continue
            parts.append((index, row, len(wanted)))
            row += len(wanted)
            rows.append(np.arange(len(wanted), dtype=np.int32) + offsets[index])
            targets.append(wanted)
            tops += [request.sampling_params.prompt_logprobs or 0] * len(wanted)
        if parts:
            self._extend(arguments, sampled, rows, np.concatenate(targets), tops)
        return parts

    def _extend(
        self,
        arguments: StepKeywords,
        sampled: int,
        rows: list[NDArray[np.int32]],
        targets: NDArray[np.int32],
        tops: list[int],
    ) -> None:
        count = len(targets)
        for name, value in _NEUTRAL.items():
            old = arguments[name]
            arguments[name] = np.concatenate([old, np.full(count, value, dtype=old.dtype)])
        arguments["logits_rows"] = np.concatenate([arguments["logits_rows"], *rows])
        asked = arguments.get("top_logprobs", np.full(sampled, -1, dtype=np.int32))
        arguments["top_logprobs"] = np.concatenate([asked, np.array(tops, dtype=np.int32)])
        masks = np.zeros((count, self._words), dtype=np.uint32)
        bits = np.uint32(1) << (targets % _WORD_BITS).astype(np.uint32)
        masks[np.arange(count), targets // _WORD_BITS] = bits
        none: list[Any] = [None] * sampled
        arguments["allowed"] = [*arguments.get("allowed", none), *masks.view(np.int32)]
        if "edits" in arguments:
            arguments["edits"] = [*arguments["edits"], *[None] * count]


def read_logprobs(arrays: Sequence[NDArray[Any]], row: int, count: int) -> TokenLogprobs:
    """Row ``row`` of what the engine returned: [R], ids [R, 20] and their values."""
    chosen, ids, values = arrays
    pairs = zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True)
    return TokenLogprobs(float(chosen[row]), {token: value for token, value in pairs if token >= 0})
