"""The C++ engine's arguments of a step, in numpy arrays that are allocated once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pocket_backend.api import SamplingParams
    from pocket_backend.core.step import ExecuteRequest

_LEAST_TOP_P = 1e-30
"""Smaller ones are 0 in float32, which the engine refuses; all of them keep one candidate."""
_UINT64_MASK = (1 << 64) - 1

Arrays = dict[str, np.ndarray[Any, Any]]


class StepArrays:
    """Filled anew for each step, which uses their first elements. Engine thread only.

    A decode step with the rows of the step before writes three arrays instead of eleven: right
    after a step Python's own data has left the caches, and each assignment costs microseconds.

    Args:
        max_sequences: rows of a step.
        max_tokens: tokens of a step.
        context: tokens per sequence.
    """

    def __init__(self, max_sequences: int, max_tokens: int, context: int) -> None:
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
        self._rows: list[tuple[int, int, SamplingParams]] = []
        """(slot, seed, parameters) of the last step if it was a decode of all of them."""
        self._arrays: Arrays = {}
        """What that step was given."""

    def fill(self, requests: Sequence[ExecuteRequest], sampled: Sequence[ExecuteRequest]) -> Arrays:
        """Arguments of the native ``step`` by name; ``sampled`` are those of ``requests`` that
        sample, in order. Valid until the next call."""
        count = len(requests)
        lengths = [len(request.token_ids) for request in requests]
        total = sum(lengths)
        if not total == count == len(sampled):
            self._rows = []
            self._fill_tokens(requests, lengths)
            return self._fill_rows(requests, sampled, total)
        self.token_ids[:count] = [request.token_ids[0] for request in requests]
        self.positions[:count] = [request.start_position for request in requests]
        rows = self._rows
        if len(rows) == count and all(
            request.sampling_params is params and request.slot_id == slot and request.seed == seed
            for request, (slot, seed, params) in zip(requests, rows, strict=True)
        ):
            self.token_index[:count] = [request.output_index for request in requests]
            return self._arrays
        self.offsets[1 : count + 1] = range(1, count + 1)
        self._arrays = self._fill_rows(requests, sampled, total)
        self._rows = [
            (request.slot_id, request.seed, request.sampling_params) for request in requests
        ]
        return self._arrays

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
    ) -> Arrays:
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
        arrays: Arrays = {
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
            arrays["top_logprobs"] = self.top_logprobs[:rows]
        return arrays
