"""What an engine did lately: its steps and the sequences that ended, in rings of a fixed size.

Plain data. The engine thread writes it through a step hook (``engine/recording.py``), which costs
nothing where none was added; ``timeline.py`` and ``chrome_trace.py`` read it. Times are seconds on
the engine's clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

DEFAULT_CAPACITY = 1 << 15
"""Steps: minutes of them. With 8 sequences in each, some 50 MB when full."""


@dataclass(slots=True)
class StepPart:
    """One sequence's share of a step. Not changed once made."""

    sequence: str
    """The request's id, with the choice's number (``id#1``) if the request asked for several."""
    slot: int
    start: int
    """Position of the first token that was computed."""
    tokens: int
    prefill: bool
    is_new: bool
    """The executor got the whole block table: the sequence entered the slot with this step, or its
    last step failed."""


@dataclass(slots=True)
class StepRecord:
    """One call of ``execute_model``. Not changed once made."""

    began: float
    ended: float
    parts: tuple[StepPart, ...]
    tokens: int
    prefill_tokens: int
    failed: bool = False
    """Nothing that it computed counts."""


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """A sequence that has ended. Times that never came are None."""

    sequence: str
    request_id: str
    arrival: float
    finished: float
    reason: str
    """``stop``, ``length``, ``cancelled`` or ``error``."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class StepRecorder:
    """Keeps the last ``capacity`` steps, and as many ended sequences.

    One thread adds; any thread may read: what it gets is a copy.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        """Raises ValueError for a capacity below 1."""
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity}; must be at least 1")
        self._steps: deque[StepRecord] = deque(maxlen=capacity)
        self._sequences: deque[SequenceRecord] = deque(maxlen=capacity)
        self.overwritten = 0
        """Steps that were recorded and are no longer kept."""

    def add_step(self, step: StepRecord) -> None:
        self.overwritten += len(self._steps) == self._steps.maxlen
        self._steps.append(step)

    def add_sequence(self, sequence: SequenceRecord) -> None:
        self._sequences.append(sequence)

    @property
    def steps(self) -> list[StepRecord]:
        """In order of time."""
        return list(self._steps)

    @property
    def sequences(self) -> list[SequenceRecord]:
        """In order of their end."""
        return list(self._sequences)
