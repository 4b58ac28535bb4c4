"""The engine thread: one thread owns scheduler and executor and steps while there is work.

Other threads only put commands into the inbox. One iteration::

    drain inbox -> schedule -> execute_model (GIL released) -> drain inbox -> update -> output stage

The second drain lets a cancellation that arrived during the computation take effect in this very
step: its token is not delivered and its blocks are free for the next one. The loop waits on a
condition when nothing can run; it never polls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pocket_backend.api import (
    BackendUnavailableError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from pocket_backend.engine.stepper import EngineStepper, RequestEntry, StepReport
from pocket_backend.observability.health import HealthState, HealthStatus, Watchdog
from pocket_backend.observability.logging import get_logger

if TYPE_CHECKING:
    from pocket_backend.engine.stats import EngineStats

_T = TypeVar("_T")
_log = get_logger("engine")

StepHook = Callable[[StepReport], None]


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Knobs of the loop that no request sees."""

    stall_seconds: float = 60.0
    """Work waiting and no step finished for this long: report it and turn unready."""
    failure_limit: int = 3
    """This many steps failing in a row: the engine is dead."""
    max_open_requests: int = 1040
    """Requests admitted or in the inbox; more are refused in the caller's thread."""
    drain_seconds: float = 0.0
    """How long ``stop`` lets open requests run when its caller does not say."""
    name: str = "pocket-engine"


class EngineLoop:
    """Runs an ``EngineStepper`` on its own thread.

    Thread contract: every public method may be called from any thread, including the engine thread
    itself (from a sink or a posted callable). Hooks and sinks run on the engine thread.

    Guarantees: every request for which ``submit`` returned gets exactly one last event, also when
    the executor fails or the loop stops. An exception of ``execute_model`` fails the requests of
    that step only; ``failure_limit`` failing steps in a row, a ``BackendUnavailableError``, or an
    exception of the scheduler kill the engine: health turns dead, everything open fails, new
    requests are refused.
    """

    def __init__(
        self,
        stepper: EngineStepper,
        options: LoopOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_step_end: Sequence[StepHook] = (),
        watchdog_thread: bool = True,
    ) -> None:
        """``clock`` is in seconds and must not go backwards; ``start`` starts the thread."""

    # --- any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread (once)."""

    def submit(self, entry: RequestEntry) -> None:
        """Hand a validated request over.

        Raises:
            InvalidRequestError: a request of that id is open.
            OverloadedError: too many are open, or the engine is draining or stopped.
            BackendUnavailableError: the engine is dead.
        """

    def cancel(self, request_id: str) -> bool:
        """End a request in whatever state it is; its last event says ``cancelled``.

        Returns whether such a request was open. Idempotent; never waits.
        """

    def post(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the engine thread, between steps or in the middle of one, soon.

        An exception of ``function`` is logged and goes no further. After ``stop`` it is dropped.
        """

    def call(self, function: Callable[[], _T], timeout: float | None = None) -> _T:
        """Run ``function`` on the engine thread and return its result (or raise its exception)."""

    def add_step_hook(self, hook: StepHook) -> None:
        """Call ``hook(report)`` on the engine thread after every step, after its events."""

    def health(self) -> HealthStatus:
        """Health now; cheap, waits for nothing (also when a step hangs)."""

    def stats(self) -> EngineStats:
        """Counters and gauges as of the last step."""

    def stop(self, drain_seconds: float | None = None) -> None:
        """Refuse new requests, let open ones run for ``drain_seconds``, fail the rest, close.

        Returns when the thread has ended and the executor is closed, except on the engine thread
        itself, where it only asks. Idempotent.
        """
