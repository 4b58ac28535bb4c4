"""The C++ engine's arguments of a step, in numpy arrays that are allocated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pocket_backend.core.step import ExecuteRequest

_LEAST_TOP_P = 1e-30
"""Smaller ones are 0 in float32, which the engine refuses; all of them keep one candidate."""
_UINT64_MASK = (1 << 64) - 1

Arguments = dict[str, Any]
"""Of the native ``step``, by name."""


class StepArrays:
    """Filled for each step, which uses their first elements. Engine thread only.

    Nearly all steps decode the sequences of the step before, one token further: then three numbers
    a row are written through memory views, and the rest stands (``again``). Right after a step
    Python's data and numpy's code have left the caches, and each array assignment costs
    microseconds.

    Args:
        max_sequences: rows of a step.
        max_tokens: tokens of a step.
        context: tokens per sequence.
        constants: arguments that are the same in each step.
    """

    def __init__(
        self,
        max_sequences: int,
        max_tokens: int,
        context: int,
        constants: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._constants = constants
        self.token_ids = np.zeros(max_tokens, dtype=np.int32)
        self.positions = np.zeros(max_tokens, dtype=np.int32)
        self.offsets = np.zeros(max_sequences + 1, dtype=np.int32)
        self.table_rows = np.zeros(max_sequences, dtype=np.int32)
        self.logits_rows = np.zeros(max_sequences, dtype=np.int32)
        self.temperature = np.zeros(max_sequences, dtype=np.float32)
        self.top_k = np.zeros(max_sequences, dtype=np.int32)
        self.top_p = np.zeros(max_sequences, dtype=np.float32)
        self.min_p = np.zeros(max_sequences, dtype=np.float32)
        self.seed = np.zeros(max_sequences, dtype=np.uint64)
        self.token_index = np.zeros(max_sequences, dtype=np.uint64)
        self.top_logprobs = np.zeros(max_sequences, dtype=np.int32)
        self.counting = np.arange(context, dtype=np.int32)
        self._advancing = tuple(
            memoryview(array)  # type: ignore[arg-type]
            for array in (self.token_ids, self.positions, self.token_index)
        )
        self._filled: Sequence[ExecuteRequest] = ()
        """The step that the arrays hold, if it decodes and samples one token of each sequence."""
        self._last: Sequence[ExecuteRequest] = ()
        """The same, once it ran."""
        self._arguments: Arguments = {}
        """What that step was given."""

    def again(self, requests: Sequence[ExecuteRequest]) -> Arguments | None:
        """What ``fill`` would return, if these are the sequences of the last step in their slots
        and order, each with its next token; else None, and ``fill`` has to follow."""
        last, self._last = self._last, ()
        if len(last) != len(requests):
            return None
        context = len(self.counting)
        tokens, positions, indices = self._advancing
        for row, request in enumerate(requests):
            before, position = last[row], request.start_position
            if (
                position != before.start_position + 1
                or position >= context
                or request.slot_id != before.slot_id
                or request.request_id != before.request_id
                or request.seed != before.seed
                or request.sampling_params is not before.sampling_params
                or request.is_new
                or request.block_copies
                or not request.samples
                or len(request.token_ids) != 1
            ):
                return None
            tokens[row] = request.token_ids[0]
            positions[row] = position
            indices[row] = request.output_index
        self._filled = requests
        return self._arguments

    def ran(self) -> None:
        """The step that was filled last has run: the next one may be ``again``."""
        self._last = self._filled

    def forget(self) -> None:
        """A slot was reset: the next step is not ``again``."""
        self._last = ()

    def fill(
        self, requests: Sequence[ExecuteRequest], sampled: Sequence[ExecuteRequest]
    ) -> Arguments:
        """Arguments of the native ``step`` by name; ``sampled`` are those of ``requests`` that
        sample, in order. Valid until the next call."""
        count = len(requests)
        lengths = [len(request.token_ids) for request in requests]
        total = sum(lengths)
        self._filled = requests if total == count == len(sampled) else ()
        self._last = ()
        self._fill_tokens(requests, lengths)
        self._arguments = self._fill_rows(requests, sampled, total)
        return self._arguments

    def _fill_tokens(self, requests: Sequence[ExecuteRequest], lengths: Sequence[int]) -> None:
        self.offsets[1 : len(lengths) + 1] = list(accumulate(lengths))
        begin = 0
        for request, length in zip(requests, lengths, strict=True):
            end = begin + length
            start = request.start_position
            self.token_ids[begin:end] = request.token_ids
            self.positions[begin:end] = self.counting[start : start + length]
            begin = end

    def _fill_rows(
        self, requests: Sequence[ExecuteRequest], sampled: Sequence[ExecuteRequest], total: int
    ) -> Arguments:
        """All but tokens, positions and offsets."""
        count = len(requests)
        self.table_rows[:count] = [request.slot_id for request in requests]
        rows = len(sampled)
        if rows == count:
            np.subtract(self.offsets[1 : count + 1], 1, out=self.logits_rows[:count])
        else:
            wanted = [i + 1 for i, request in enumerate(requests) if request.samples]
            self.logits_rows[:rows] = self.offsets[wanted] - 1
        params = [request.sampling_params for request in sampled]
        self.temperature[:rows] = [p.temperature for p in params]
        self.top_k[:rows] = [p.top_k for p in params]
        self.top_p[:rows] = [max(p.top_p, _LEAST_TOP_P) for p in params]
        self.min_p[:rows] = [p.min_p for p in params]
        # A client's seed may be negative: its two's complement is the key.
        self.seed[:rows] = [request.seed & _UINT64_MASK for request in sampled]
        self.token_index[:rows] = [request.output_index for request in sampled]
        arguments: Arguments = {
            **self._constants,
            "token_ids": self.token_ids[:total],
            "positions": self.positions[:total],
            "sequence_offsets": self.offsets[: count + 1],
            "table_rows": self.table_rows[:count],
            "logits_rows": self.logits_rows[:rows],
            "temperature": self.temperature[:rows],
            "top_k": self.top_k[:rows],
            "top_p": self.top_p[:rows],
            "min_p": self.min_p[:rows],
            "seed": self.seed[:rows],
            "token_index": self.token_index[:rows],
        }
        asked = [p.logprobs for p in params]
        if asked.count(None) < rows:
            self.top_logprobs[:rows] = [-1 if count is None else count for count in asked]
            arguments["top_logprobs"] = self.top_logprobs[:rows]
        return arguments
