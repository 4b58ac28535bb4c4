"""Health as probes see it, and the watchdog that reports work without progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

HealthState = Literal["starting", "ok", "stalled", "draining", "stopped", "dead"]


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """What a probe needs: ``alive`` answers liveness, ``ready`` answers readiness.

    ``stalled`` (work waits, no step has ended for the stall time) is alive but not ready: a long
    step may still end. ``dead`` is neither, and only a new engine brings it back.
    """

    status: HealthState
    backend: str
    ready: bool
    alive: bool
    message: str = ""
    details: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def as_dict(self) -> dict[str, object]:
        return {
            "status": self.status,
            "backend": self.backend,
            "ready": self.ready,
            "alive": self.alive,
            "message": self.message,
            "details": dict(self.details),
        }


@dataclass(slots=True)
class Watchdog:
    """Decides whether waiting work makes progress. A pure state machine: time is passed in.

    Progress is the end of a step, the arrival of the first work, or the end of the last. Whoever
    calls ``observe`` logs what it returns.
    """

    stall_seconds: float
    last_progress: float = 0.0
    stalled: bool = False

    def progress(self, now: float) -> bool:
        """Note progress; true if this ends a reported stall."""
        self.last_progress = now
        recovered, self.stalled = self.stalled, False
        return recovered

    def observe(self, now: float, *, work_waiting: bool) -> bool:
        """True exactly once per stall, when the stall time has just been exceeded."""
        stalled = work_waiting and now - self.last_progress > self.stall_seconds
        newly = stalled and not self.stalled
        self.stalled = stalled
        return newly
