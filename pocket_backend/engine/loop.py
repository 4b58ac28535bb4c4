"""The engine thread: one thread owns scheduler and executor and steps while there is work.

Other threads only put commands into the inbox. One iteration::

    drain inbox -> schedule -> execute_model (GIL released) -> drain inbox -> update -> output stage

The second drain lets a cancellation that arrived during the computation take effect in this very
step: its token is not delivered and its blocks are free for the next one. The loop waits on a
condition when nothing can run; it never polls.
"""

from __future__ import annotations

import atexit
import logging
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
from pocket_backend.engine.stepper import EngineStepper, FatalEngineError
from pocket_backend.observability.health import HealthState, HealthStatus, Watchdog
from pocket_backend.observability.logging import get_logger, log_event

if TYPE_CHECKING:
    from pocket_backend.engine.entries import RequestEntry, StepReport
    from pocket_backend.engine.stats import EngineStats

_T = TypeVar("_T")
_log = get_logger("engine")

StepHook = Callable[["StepReport"], None]
_Command = Callable[[], None]
_SHUTTING_DOWN = "the engine is shutting down; send the request elsewhere"
_LEAST_WAIT = 0.001
"""Seconds; the scheduler counts a deadline from when it saw the request, a little after arrival."""
_EXIT_JOIN_SECONDS = 30.0
"""A step that hangs must not keep the interpreter from exiting for ever."""


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Knobs of the loop that no request sees."""

    stall_seconds: float = 60.0
    """Work waiting and no step finished for this long: report it and turn unready."""
    max_open_requests: int = 1040
    """Requests admitted or in the inbox; more are refused in the caller's thread."""
    name: str = "pocket-engine"


class EngineLoop:
    """Runs an ``EngineStepper`` on its own thread.

    Thread contract: every public method may be called from any thread, including the engine thread
    itself (from a sink, a hook or a posted callable). Hooks and sinks run on the engine thread.

    Guarantees: every request for which ``submit`` returned gets exactly one last event, also when
    the executor fails or the loop stops. An exception of ``execute_model`` fails the requests of
    that step only. What ends the engine (``FatalEngineError``) turns health to ``dead``, fails
    everything open and refuses new requests; the thread itself goes on running posted callables
    until ``stop``, because it may be the only one that is allowed to send.
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
        self._stepper = stepper
        self._options = options or LoopOptions()
        self._clock = clock
        self._hooks = list(on_step_end)
        self._inbox: deque[_Command] = deque()
        # Guards everything below; never held while a sink, hook, command or the executor runs.
        self._wake = threading.Condition()
        self._open: dict[str, RequestEntry] = {}
        self._state: HealthState = "starting"
        self._message = ""
        self._stop_at: float | None = None
        self._watchdog = Watchdog(self._options.stall_seconds, last_progress=clock())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._options.name, daemon=True)
        self._monitor: threading.Thread | None = None
        if watchdog_thread:
            self._monitor = threading.Thread(
                target=self._watch, name=f"{self._options.name}-watchdog", daemon=True
            )
        stepper.outputs.on_finish = self._forget

    # --- any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread (once)."""
        with self._wake:
            if self._state != "starting":
                raise EngineError(f"start: the engine is {self._state}")
            self._state = "ok"
        # The threads are daemons, so that an engine nobody closed does not keep the interpreter
        # alive; it is closed in order all the same.
        atexit.register(self._stop_at_exit)
        self._thread.start()
        if self._monitor is not None:
            self._monitor.start()

    def submit(self, entry: RequestEntry) -> None:
        """Hand a validated request over.

        Raises:
            InvalidRequestError: a request of that id is open.
            OverloadedError: too many are open, or the engine is draining or stopped.
            BackendUnavailableError: the engine is dead.
        """
        request_id = entry.request.request_id
        with self._wake:
            if self._state == "dead":
                raise BackendUnavailableError(f"the engine is dead: {self._message}")
            if self._state in ("draining", "stopped"):
                raise OverloadedError(_SHUTTING_DOWN)
            if request_id in self._open:
                raise InvalidRequestError.of(
                    "request_id", request_id, "a request with this id is open; choose another"
                )
            limit = self._options.max_open_requests
            if len(self._open) >= limit:
                raise OverloadedError(
                    f"{len(self._open)} requests are open and the limit is {limit}; try again later"
                )
            if not self._open:
                self._watchdog.progress(self._clock())
            self._open[request_id] = entry
            self._inbox.append(lambda: self._stepper.add(entry))
            self._wake.notify_all()

    def cancel(self, request_id: str) -> bool:
        """End a request in whatever state it is; its last event says ``cancelled``.

        Returns whether such a request was open. Idempotent; never waits.
        """
        with self._wake:
            entry = self._open.get(request_id)
            if entry is None:
                return False
            self._inbox.append(lambda: self._stepper.cancel(entry))
            self._wake.notify_all()
            return True

    def post(self, function: Callable[[], None]) -> bool:
        """Run ``function`` on the engine thread, between steps or in the middle of one, soon.

        In order of posting. An exception of ``function`` is logged and goes no further. False (and
        not run) after the loop has ended.
        """
        with self._wake:
            if self._state == "stopped":
                return False
            self._inbox.append(function)
            self._wake.notify_all()
            return True

    def call(self, function: Callable[[], _T], timeout: float | None = None) -> _T:
        """Run ``function`` on the engine thread; return its result or raise its exception.

        Raises:
            EngineError: the loop has ended.
            TimeoutError: it did not run within ``timeout`` seconds (it may still).
        """
        if threading.current_thread() is self._thread:
            return function()
        done = threading.Event()
        results: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001  (handed to the caller's thread)
                errors.append(error)
            finally:
                done.set()

        if not self.post(run):
            raise EngineError("call: the engine has stopped")
        if not done.wait(timeout):
            raise TimeoutError(f"call: no answer from the engine thread within {timeout} seconds")
        if errors:
            raise errors[0]
        return results[0]

    def add_step_hook(self, hook: StepHook) -> None:
        """Call ``hook(report)`` on the engine thread after every iteration that ran a step or
        delivered an event (``report.sequences`` is 0 if no step ran)."""
        self.post(lambda: self._hooks.append(hook))

    def health(self) -> HealthStatus:
        """Health now; cheap, waits for nothing (also when a step hangs)."""
        now = self._clock()
        with self._wake:
            open_requests = len(self._open)
            running = self._state in ("ok", "draining")
            newly_stalled = running and self._watchdog.observe(
                now, work_waiting=bool(self._open or self._inbox)
            )
            idle_for = max(0.0, now - self._watchdog.last_progress)
            status: HealthState = self._state
            if status == "ok" and self._watchdog.stalled:
                status = "stalled"
            message = self._message
            if self._watchdog.stalled and running:
                message = f"{open_requests} requests wait and no step ended for {idle_for:.1f} s"
        if newly_stalled:
            self._stepper.counters.stalls += 1
            log_event(
                _log,
                logging.ERROR,
                "work waiting, no progress",
                open_requests=open_requests,
                seconds=idle_for,
                executing=self._stepper.executing,
            )
        return HealthStatus(
            status=status,
            backend=self._stepper.backend_name,
            ready=status == "ok",
            alive=status not in ("dead", "stopped"),
            message=message,
            details={
                "open_requests": open_requests,
                "seconds_since_progress": idle_for,
                "steps": self._stepper.counters.steps,
            },
        )

    def stats(self) -> EngineStats:
        """Counters and gauges: of this moment on the engine thread, else at most 0.1 s old."""
        if threading.current_thread() is self._thread:
            self._stepper.refresh_stats()
        return self._stepper.stats

    def ask_to_stop(self, drain_seconds: float = 0.0) -> None:
        """The first half of ``stop``: refuse new requests; never waits."""
        with self._wake:
            deadline = self._clock() + max(0.0, drain_seconds)
            self._stop_at = deadline if self._stop_at is None else min(self._stop_at, deadline)
            if self._state == "ok":
                self._state = "draining"
            self._wake.notify_all()

    def stop(self, drain_seconds: float = 0.0, join_seconds: float | None = None) -> bool:
        """Refuse new requests, let open ones run for ``drain_seconds``, fail the rest, close.

        Returns when the thread has ended and the executor is closed: true. False if that took
        longer than ``join_seconds`` (a step hangs), or when called on the engine thread, where it
        only asks. Idempotent; a later call may shorten the drain.
        """
        with self._wake:
            never_started = self._state == "starting"
            if never_started:
                self._state = "stopped"
        if never_started:  # no engine thread: this one does its last duty
            self._end()
            return True
        self.ask_to_stop(drain_seconds)
        current = threading.current_thread()
        if current is self._thread:
            return False
        self._thread.join(join_seconds)
        if self._monitor is not None and current is not self._monitor and self._ended.is_set():
            self._monitor.join()
        return self._ended.is_set()

    def _stop_at_exit(self) -> None:
        self.stop(0.0, _EXIT_JOIN_SECONDS)

    # --- engine thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._should_end():
                self._iterate()
        finally:
            self._end()

    def _iterate(self) -> None:
        """One turn: commands, then a step if there is one, else wait for what could change that."""
        stepper = self._stepper
        self._drain()
        ran = False
        try:
            if self._state != "dead":
                ran = stepper.step(self._drain)
        except FatalEngineError as error:
            self._die(str(error))
        except Exception as error:  # noqa: BLE001  (a bug here must not leave clients hanging)
            log_event(_log, logging.CRITICAL, "engine step raised", exc_info=error)
            self._die(f"internal error: {error}")
        # Without the lock: `health` may see this step or not, and either is true of some moment.
        if ran and self._watchdog.progress(self._clock()):
            log_event(_log, logging.WARNING, "progress again after a stall")
        self._run_hooks()
        if not ran:
            self._wait()

    def _drain(self) -> None:
        """Run what is in the inbox, in order; what these commands post comes next time."""
        if not self._inbox:
            return
        with self._wake:
            commands = list(self._inbox)
            self._inbox.clear()
        self._run_commands(commands)

    def _run_commands(self, commands: Sequence[_Command]) -> None:
        for command in commands:
            try:
                command()
            except Exception as error:  # noqa: BLE001  (one command must not end the loop)
                log_event(_log, logging.ERROR, "posted callable raised", exc_info=error)

    def _wait(self) -> None:
        """Sleep until the inbox fills, a deadline passes or the drain ends."""
        if self._state != "dead":
            self._stepper.idle()
        with self._wake:
            if self._inbox or self._should_end():
                return
            times = [t for t in (self._stepper.next_deadline(), self._stop_at) if t is not None]
            timeout = max(_LEAST_WAIT, min(times) - self._clock()) if times else None
            self._wake.wait(timeout)

    def _should_end(self) -> bool:
        if self._stop_at is None:  # set once and for all, so a look without the lock will do
            return False
        with self._wake:
            return not self._open or self._state == "dead" or self._clock() >= self._stop_at

    def _run_hooks(self) -> None:
        report = self._stepper.take_report()
        if report is None:
            return
        for hook in self._hooks:
            try:
                hook(report)
            except Exception as error:  # noqa: BLE001  (a hook must not end the loop)
                log_event(_log, logging.ERROR, "step hook raised", exc_info=error)

    def _forget(self, entry: RequestEntry) -> None:
        """The stepper is about to deliver an entry's last event: its id is free again."""
        with self._wake:
            self._open.pop(entry.request.request_id, None)

    def _fail_open(self, make_error: Callable[[], Exception]) -> None:
        """Each request gets its own exception: they are raised on different threads."""
        with self._wake:
            entries = list(self._open.values())
        for entry in entries:
            self._stepper.fail(entry, make_error())

    def _die(self, reason: str) -> None:
        with self._wake:
            self._state, self._message = "dead", reason
        log_event(_log, logging.CRITICAL, "engine dead", reason=reason)
        self._fail_open(lambda: EngineError(f"the engine died: {reason}"))

    def _end(self) -> None:
        """Nothing may be left open, and nothing can be put into the inbox from here on."""
        with self._wake:
            self._state, rest = "stopped", list(self._inbox)
            self._inbox.clear()
        self._run_commands(rest)
        self._fail_open(lambda: OverloadedError(_SHUTTING_DOWN))
        self._run_hooks()
        self._stepper.close()
        self._ended.set()
        atexit.unregister(self._stop_at_exit)

    # --- watchdog thread ----------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at health now and then, so that a stall is logged even if nobody probes."""
        interval = min(5.0, max(0.05, self._options.stall_seconds / 4))
        while not self._ended.wait(interval):
            self.health()
