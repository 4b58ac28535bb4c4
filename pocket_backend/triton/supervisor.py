"""Keeps one Triton server serving: notices what died or hangs, restarts it, and drains it in order.

Recovery is always a restart of the whole server, although Triton can reload a single model.  With
2.51 the requests that were open in a dead decoupled stub never end, neither with an answer nor with
an error: their clients wait for ever, and the ensemble can never be unloaded.  Ending the server
process closes their connections, which every client sees as an error, and a start takes seconds.

Everything runs on the caller's thread except the canaries, which only ask.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pocket_backend.api.errors import ConfigurationError, EngineError, PocketLLMError
from pocket_backend.observability.logging import get_logger, log_event
from pocket_backend.triton import probes
from pocket_backend.triton.launcher import TritonServer
from pocket_backend.triton.lifeline import EngineStatus
from pocket_backend.triton.liveness import (
    SERVER,
    Canary,
    LivenessPolicy,
    Watch,
    find_processes,
    sample_process,
)

_log = get_logger("supervisor")
_GENERATOR = "generator"
_STUBS = ("tokenizer", _GENERATOR, "detokenizer")
_PERIOD = 0.5
"""Seconds between two looks at the processes, and between two questions of a canary."""
_CANARY_TIMEOUT = 300.0
"""Longer than any limit of ``LivenessPolicy``: judging the wait is not the canary's business."""
_MAX_FAILURES = 6
"""Errors in a row from a model that Triton takes for loaded: three seconds."""
_SERVER_ENDED = "the server ended by itself"
_DELIVERY_SECONDS = 3.0
"""For the error events of a drain to reach their clients, after the engine has ended them."""
_ASK_SECONDS = 2.0
_SERVER_SLOW = 1.0
"""A server that takes longer to say that it lives is itself what questions wait for."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often, and after which waits (seconds), a failing server is started again.

    The first restart is at once; the next ones wait ``first_delay``, doubled each time up to
    ``max_delay``. After ``max_restarts`` restarts in a row the supervisor gives up; a server that
    served for ``stable_seconds`` starts the count anew.
    """

    max_restarts: int = 5
    first_delay: float = 1.0
    max_delay: float = 30.0
    stable_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts: got {self.max_restarts}; must be 0 or more")

    def delay(self, restarts: int) -> float | None:
        """Seconds to wait before the next restart after ``restarts`` in a row; None: give up."""
        if restarts >= self.max_restarts:
            return None
        if restarts == 0:
            return 0.0
        return min(self.max_delay, self.first_delay * 2.0 ** min(restarts - 1, 30))


@dataclass(frozen=True, slots=True)
class SupervisionPolicy:
    """Everything that an operator may tune. ``drain_seconds``: what open requests get at a stop."""

    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    liveness: LivenessPolicy = field(default_factory=LivenessPolicy)
    drain_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.drain_seconds <= 3600.0:
            raise ConfigurationError(
                f"drain_seconds: got {self.drain_seconds}; must be from 0 to 3600"
            )


class Supervisor:
    """Watches a started server until it has to give up. Not thread-safe.

    ``run`` returns by an exception only, so a caller ends it with one of its own (a signal
    handler's KeyboardInterrupt), calls ``drain``, and then stops the server.
    """

    def __init__(
        self,
        server: TritonServer,
        policy: SupervisionPolicy | None = None,
        *,
        report: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``report``: called with each event's name and fields, besides the log."""
        self._server = server
        self._policy = policy or SupervisionPolicy()
        self._report = report
        self._clock = clock
        self._sleep = sleep
        self._restarts = 0
        """In a row, without ``stable_seconds`` of service in between."""

    def run(self) -> None:
        """Watch, and restart what fails.

        Raises:
            EngineError: it failed more often than the policy allows; says what happened last.
        """
        while True:
            started = self._clock()
            problem = self._watch_until_trouble()
            if self._clock() - started >= self._policy.restarts.stable_seconds:
                self._restarts = 0
            self._restart(problem)

    def drain(self, seconds: float | None = None) -> None:
        """Stop admission, wait for open requests, end what is left with an error event.

        Readiness turns false and new requests get UNAVAILABLE at once. Returns when no request is
        open, at most some seconds after ``seconds`` (the policy's ``drain_seconds``). Called again,
        by whoever interrupted it, it shortens the wait.
        """
        limit = self._policy.drain_seconds if seconds is None else seconds
        started = self._clock()
        server = self._server
        if not server.running:
            return
        try:
            status = server.lifeline.drain(limit, _ASK_SECONDS)
        except OSError as error:
            self._tell(logging.WARNING, "cannot drain", reason=str(error))
            return
        try:
            probes.turn_unready(server.http_url, server.admin_key, _ASK_SECONDS)
        except OSError as error:
            self._tell(logging.WARNING, "readiness stays true", reason=str(error))
        self._tell(logging.INFO, "draining", open_requests=status.open_requests, seconds=limit)
        left = self._wait_for_open_requests(started + limit)
        self._tell(logging.INFO, "drained", ended_with_error=left, seconds=self._clock() - started)

    def _tell(self, level: int, event: str, **fields: object) -> None:
        log_event(_log, level, event, exc_info=None, **fields)
        if self._report is not None:
            self._report(event.replace(" ", "_"), **fields)

    def _wait_for_open_requests(self, deadline: float) -> int:
        """Returns how many were open at ``deadline``; the engine then ended them."""
        left = 0
        while self._clock() < deadline + _DELIVERY_SECONDS:
            try:
                status = self._server.lifeline.status(_ASK_SECONDS)
            except OSError:
                return left
            if status.open_requests == 0:
                return left
            if self._clock() >= deadline - 2 * _PERIOD:
                left = status.open_requests
            self._sleep(0.05)
        return left

    # --- watching ---------------------------------------------------------------------------------

    def _watch_until_trouble(self) -> str:
        """Returns one line that says what is wrong."""
        watcher = _Watcher(self._server, self._policy.liveness, self._clock)
        try:
            while True:
                problem = watcher.look()
                if problem is not None:
                    return problem
                self._sleep(_PERIOD)
        finally:
            watcher.close()

    # --- restarting -------------------------------------------------------------------------------

    def _restart(self, problem: str) -> None:
        """Start the server again, with as many attempts as the policy has left.

        Raises:
            EngineError: none is left.
        """
        since = self._clock()
        self._tell(logging.ERROR, "server unhealthy", problem=problem)
        while True:
            delay = self._policy.restarts.delay(self._restarts)
            if delay is None:
                lines = self._server.failure_lines()
                self._tell(logging.CRITICAL, "giving up", problem=problem, restarts=self._restarts)
                raise EngineError(
                    f"{problem}; its log says:\n{lines}"
                    if self._restarts == 0
                    else f"gave up after {self._restarts} restarts in a row: {problem}; "
                    f"its log says:\n{lines}"
                )
            self._restarts += 1
            self._tell(logging.WARNING, "restarting", attempt=self._restarts, delay_seconds=delay)
            # Clients that wait for the dead see their connections close now, not after the delay.
            self._server.stop(0.0)
            self._sleep(delay)
            try:
                self._server.start()
            except PocketLLMError as error:
                problem = f"restart failed: {error}"
                self._tell(logging.ERROR, "restart failed", reason=str(error))
                continue
            self._tell(logging.INFO, "service restored",
                seconds=self._clock() - since, restarts=self._restarts,
            )  # fmt: skip
            return


class _Watcher:
    """The processes of one start of the server."""

    def __init__(
        self, server: TritonServer, policy: LivenessPolicy, clock: Callable[[], float]
    ) -> None:
        self._server = server
        self._policy = policy
        self._clock = clock
        self._watches: dict[str, Watch | None] = dict.fromkeys((SERVER, *_STUBS))
        """By name; None while no such process is known: it died already, or was never loaded."""
        self._find()
        self._status = _StatusCanary(server)
        base = server.http_url
        self._canaries = {
            SERVER: Canary(SERVER, lambda: probes.live(base, _CANARY_TIMEOUT), _PERIOD),
            "tokenizer": Canary(
                "tokenizer", lambda: probes.tokenize(base, _CANARY_TIMEOUT), _PERIOD
            ),
            "detokenizer": Canary(
                "detokenizer", lambda: probes.detokenize(base, _CANARY_TIMEOUT), _PERIOD
            ),
            _GENERATOR: self._status.canary,
        }

    def close(self) -> None:
        for canary in self._canaries.values():
            canary.close()

    def look(self) -> str | None:
        """One round: what is wrong, or None."""
        if not self._server.running:
            return _SERVER_ENDED
        now = self._clock()
        for name, watch in list(self._watches.items()):
            waiting = self._waiting_seconds(name)
            sample = None
            if watch is not None:
                # For most of ``stall_seconds``, and not at every look at a calm server.
                sample = sample_process(watch.pid, threads=waiting > _PERIOD)
            if watch is None or sample is None:
                problem = self._missing(name)
            else:
                problem = watch.observe(now, sample, waiting)
            problem = problem or self._failing(name)
            if name == SERVER and problem == "died":
                return _SERVER_ENDED
            if problem is not None:
                return f"{name} {problem}" + (f" (process {watch.pid})" if watch else "")
        return None

    def _find(self) -> None:
        """Learn the processes of names that have none, or another one by now."""
        for name, pid in find_processes(self._server.server_id).items():
            known = self._watches.get(name)
            if known is None or known.pid != pid:
                self._watches[name] = Watch(pid, self._policy)

    def _waiting_seconds(self, name: str) -> float:
        now = time.monotonic()
        canary = self._canaries.get(name)
        waiting = canary.waiting_seconds(now) if canary is not None else 0.0
        if name == _GENERATOR:
            return max(waiting, self._status.waiting_seconds(now))
        if name != SERVER and self._canaries[SERVER].waiting_seconds(now) >= _SERVER_SLOW:
            return 0.0  # the question may not have reached the stub
        return waiting

    def _missing(self, name: str) -> str | None:
        """A stub that Triton ended (unload, reload) is no trouble; one that just went is."""
        known = self._watches[name]
        self._find()
        if self._watches[name] is not known:
            return None
        if name == SERVER:
            return "died"
        try:
            probes.model_ready(self._server.http_url, name, _ASK_SECONDS)
        except OSError:
            return None  # not loaded, or being unloaded; a successor will be found
        return "died"

    def _failing(self, name: str) -> str | None:
        canary = self._canaries.get(name)
        if canary is None or canary.failures < _MAX_FAILURES:
            return None
        try:
            probes.model_ready(self._server.http_url, name, _ASK_SECONDS)
        except OSError:
            return None  # not loaded, or the server's own watch will tell
        return f"answers with errors: {canary.last_error}"


class _StatusCanary:
    """Asks the generator for its engine's status, over the lifeline."""

    def __init__(self, server: TritonServer) -> None:
        self._lifeline = server.lifeline
        self._status: EngineStatus | None = None
        self._received_at = 0.0
        self.canary = Canary(_GENERATOR, self._ask, _PERIOD)

    def waiting_seconds(self, now: float) -> float:
        """How long work has been waiting for a step, as far as the last status tells."""
        status = self._status
        if status is None or not status.open_requests:
            return 0.0
        return status.waiting_seconds + (now - self._received_at)

    def _ask(self) -> None:
        self._status = self._lifeline.status(_CANARY_TIMEOUT)
        self._received_at = time.monotonic()
