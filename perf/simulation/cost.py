"""What a step of an executor takes, as a function of what the plan asks for.

    seconds = base + per_prefill * prefill tokens + per_decode * decode tokens
              + per_attended * attended positions

A token at position p attends to p + 1 positions. ``base`` is what a step costs however little it
does: above all reading the weights once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pocket_backend.core.step import ExecuteRequest


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds; see the module.

    Raises:
        ValueError: a coefficient is negative, or all are 0 (time would stand still).
    """

    base: float
    per_prefill: float
    per_decode: float
    per_attended: float

    def __post_init__(self) -> None:
        if min(self.values) < 0 or not (self.base > 0 or min(self.values[1:3]) > 0):
            raise ValueError(
                f"cost: got {self.values}; none may be negative, and a step takes time"
            )

    @property
    def values(self) -> tuple[float, float, float, float]:
        return (self.base, self.per_prefill, self.per_decode, self.per_attended)

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """Four numbers of microseconds with commas between: what ``--fit`` prints.

        Raises:
            ValueError: not four numbers, or see the class.
        """
        parts = text.split(",")
        if len(parts) != 4:
            raise ValueError(f"cost: got {text!r}; four numbers of microseconds are needed")
        return cls(*[float(part) * 1e-6 for part in parts])

    def __str__(self) -> str:
        return ",".join(f"{value * 1e6:.4g}" for value in self.values)

    def seconds(self, prefill: int, decode: int, attended: int) -> float:
        return (
            self.base
            + self.per_prefill * prefill
            + self.per_decode * decode
            + self.per_attended * attended
        )


def attended_positions(requests: Sequence[ExecuteRequest]) -> int:
    """Sum over all computed tokens of the positions that each attends to."""
    total = 0
    for request in requests:
        count = len(request.token_ids)
        total += count * request.start_position + count * (count + 1) // 2
    return total


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model and how well it describes the samples."""

    model: CostModel
    median_error: float
    """Median of |predicted - measured| / measured."""
    worst_error: float
    samples: int


def fit(samples: Sequence[tuple[int, int, int, float]]) -> Fit:
    """Least squares of *relative* errors on (prefill, decode, attended, seconds), coefficients kept
    at 0 or above by dropping the most negative one and fitting again.

    Raises:
        ValueError: fewer than four samples.
    """
    if len(samples) < 4:
        raise ValueError("fit: at least four samples are needed")
    data = np.array(samples, dtype=np.float64)
    matrix = np.column_stack([np.ones(len(data)), data[:, :3]])
    seconds = data[:, 3]
    active = [0, 1, 2, 3]
    coefficients = np.zeros(4)
    while active:
        solution, *_ = np.linalg.lstsq(
            matrix[:, active] / seconds[:, None], np.ones(len(data)), rcond=None
        )
        if solution.min() >= 0:
            coefficients[active] = solution
            break
        active.pop(int(solution.argmin()))
    errors = np.abs(matrix @ coefficients - seconds) / seconds
    model = CostModel(*[float(value) for value in coefficients])
    return Fit(model, float(np.median(errors)), float(errors.max()), len(data))
