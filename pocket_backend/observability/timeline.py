"""The life of each sequence, put together from recorded steps.

A life is a list of phases in order of time: ``queue`` (arrival to first step), one ``prefill`` per
chunk, ``decode`` for a run of steps of one token each, and ``preempted`` where the sequence lost
its slot and waited for another one. Between two phases the sequence held its slot while steps ran
that had no share for it, or none ran.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pocket_backend.observability.steps import SequenceRecord, StepPart, StepRecord

PhaseName = Literal["queue", "prefill", "decode", "preempted"]
NO_SLOT = -1


@dataclass(slots=True)
class Phase:
    """Times in seconds on the engine's clock. Not changed once the timeline is returned."""

    name: PhaseName
    begin: float
    end: float
    slot: int = NO_SLOT
    start: int = 0
    """Position of the first token that was computed."""
    tokens: int = 0
    """Computed in this phase. Those of failed steps do not count."""
    steps: int = 0


@dataclass(slots=True)
class Timeline:
    """One sequence's life. ``record`` is None while it has not ended."""

    sequence: str
    record: SequenceRecord | None = None
    phases: list[Phase] = field(default_factory=list)

    @property
    def begin(self) -> float:
        """Arrival; of a sequence that has not ended, its first recorded step."""
        return self.phases[0].begin if self.record is None else self.record.arrival

    @property
    def end(self) -> float:
        return self.phases[-1].end if self.record is None else self.record.finished

    def as_dict(self) -> dict[str, object]:
        """For JSON; seconds since the arrival."""
        zero = self.begin
        return {
            "sequence": self.sequence,
            "seconds": round(self.end - zero, 6),
            "phases": [
                {
                    "phase": phase.name,
                    "begin_seconds": round(phase.begin - zero, 6),
                    "end_seconds": round(phase.end - zero, 6),
                    **_work(phase),
                }
                for phase in self.phases
            ],
        }


def _work(phase: Phase) -> dict[str, int]:
    if phase.slot == NO_SLOT:
        return {}
    return {
        "slot": phase.slot,
        "start_position": phase.start,
        "tokens": phase.tokens,
        "steps": phase.steps,
    }


def timelines(steps: Iterable[StepRecord], ended: Iterable[SequenceRecord]) -> list[Timeline]:
    """Lives in order of their begin.

    Steps that a ring no longer has are missing from the lives that they were part of. A request id
    that was used again after its request had ended gives two lives.
    """
    records: dict[str, list[SequenceRecord]] = defaultdict(list)
    for record in ended:
        records[record.sequence].append(record)
    ends = {name: [record.finished for record in found] for name, found in records.items()}
    lives: dict[tuple[str, int], _Life] = {}
    for name, found in records.items():
        for index, record in enumerate(found):
            lives[name, index] = _Life(Timeline(name, record))
    for step in steps:
        for part in step.parts:
            # A sequence ends in its last step or later, and before the first one of the next life.
            key = (part.sequence, bisect_left(ends.get(part.sequence, []), step.ended))
            life = lives.get(key)
            if life is None:
                life = lives[key] = _Life(Timeline(part.sequence))
            life.add(step, part)
    return sorted((life.timeline for life in lives.values()), key=lambda found: found.begin)


class _Life:
    """Builds one timeline; parts come in order of time."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._queue: Phase | None = None
        record = timeline.record
        if record is not None:
            admitted = record.first_scheduled
            end = record.finished if admitted is None else admitted
            self._queue = Phase("queue", record.arrival, end)
            timeline.phases.append(self._queue)
        self._last: Phase | None = None
        """The last phase in a slot."""
        self._failed = False
        """Whether the last step did."""

    def add(self, step: StepRecord, part: StepPart) -> None:
        last = self._last
        tokens = 0 if step.failed else part.tokens
        entered = self._enters(part)
        self._failed = step.failed
        if last is None:
            if entered and self._queue is not None:
                self._queue.end = step.began
        elif entered:
            self.timeline.phases.append(Phase("preempted", last.end, step.began))
        elif last.name == "decode" and not part.prefill:
            last.end = step.ended
            last.tokens += tokens
            last.steps += 1
            return
        name: PhaseName = "prefill" if part.prefill else "decode"
        self._last = Phase(name, step.began, step.ended, part.slot, part.start, tokens, 1)
        self.timeline.phases.append(self._last)

    def _enters(self, part: StepPart) -> bool:
        """Whether the sequence came into this slot; after a failed step it may only have stayed."""
        stayed = self._failed and self._last is not None and self._last.slot == part.slot
        return part.is_new and not stayed
