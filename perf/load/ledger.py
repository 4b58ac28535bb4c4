"""Double entry for a load: every request that was sent has one end, and faults excuse only errors.

The ends are ``answered`` (to the end, counts agreeing), ``errored`` (the server or the connection
said so), ``cancelled`` (the client left, or asked for it) and ``lost``: nothing within the client's
patience.  A lost request is what no server may cause, whatever is done to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perf.load.mix import OK, Outcome

ANSWERED, ERRORED, CANCELLED, LOST = ENDS = ("answered", "errored", "cancelled", "lost")
_PATIENCE = ("DeadlineExceededError", "TimeoutError")
"""Errors of a client that gave up waiting, of kinds that set no deadline of their own."""
_OF_KIND = {
    "leave": CANCELLED, "cancel": CANCELLED, "noise": CANCELLED,
    "deadline": ERRORED, "invalid": ERRORED, "garbage": ERRORED,
}  # fmt: skip
"""How a request of that kind ends if all goes well; others are answered."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to the server. Times in seconds since the load began."""

    name: str
    began: float
    ended: float
    """From when on clients must notice nothing of it any more."""
    excuses: frozenset[str] | None = None
    """Classes of errors that it explains; None: of all errors."""

    def explains(self, outcome: Outcome) -> bool:
        """An error of a request that was open, or was sent, meanwhile; a wrong answer never."""
        return (
            bool(outcome.error)
            and (self.excuses is None or outcome.error in self.excuses)
            and outcome.at <= self.ended
            and outcome.at + outcome.seconds >= self.began
        )


@dataclass(slots=True)
class Ledger:
    """The account of a run. Not thread-safe: filled when the load has stopped."""

    sent: Counter[str] = field(default_factory=Counter)
    """By kind."""
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By kind and end."""
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, sent: Mapping[str, int], outcomes: Sequence[Outcome]) -> None:
        """Enter a load that has stopped; its outcomes count their times from the run's start."""
        self.sent.update(sent)
        self.outcomes += outcomes
        self.ends.update((outcome.kind, end_of(outcome)) for outcome in outcomes)

    def total(self, end: str) -> int:
        return sum(count for (_, how), count in self.ends.items() if how == end)

    @property
    def unaccounted(self) -> int:
        """Requests without an end, and lost ones: sent - answered - errored - cancelled."""
        closed = self.total(ANSWERED) + self.total(ERRORED) + self.total(CANCELLED)
        return self.sent.total() - closed

    def unexplained(self, faults: Sequence[Fault]) -> list[Outcome]:
        """Requests that did not end as their kind should, though no fault explains it."""
        return [
            outcome
            for outcome in self.outcomes
            if outcome.ended != OK and not any(fault.explains(outcome) for fault in faults)
        ]

    def rows(self) -> list[tuple[str, ...]]:
        """Kind, sent, then the ends; the last row has the sums."""
        kinds = sorted(self.sent)
        rows = [
            (kind, str(self.sent[kind]), *(str(self.ends[kind, end]) for end in ENDS))
            for kind in kinds
        ]
        sums = (str(self.total(end)) for end in ENDS)
        return [*rows, ("all", str(self.sent.total()), *sums)]


HEADER = ("requests", "sent", *ENDS)


def end_of(outcome: Outcome) -> str:
    """One of ``ENDS``."""
    if outcome.error in _PATIENCE or "timed out" in outcome.ended:
        return LOST
    if outcome.error:
        return ERRORED
    if outcome.ended != OK:  # read to an end that its kind should not have
        return ANSWERED
    return _OF_KIND.get(outcome.kind, ANSWERED)
