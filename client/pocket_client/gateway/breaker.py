"""Stops sending to a server that does not answer, and finds out when it does again."""

from __future__ import annotations

from dataclasses import dataclass

FAILURES = 3
"""In a row, until the circuit opens: one broken connection is no broken server."""
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


@dataclass(slots=True)
class CircuitBreaker:
    """Pure: the time, in seconds, is passed in.

    *closed*: requests pass. After ``FAILURES`` failures in a row it is *open*: none pass for a
    pause that doubles each time, up to the longest. Then it is *half open*: one trial passes, whose
    success closes it and whose failure opens it again.
    """

    _failures: int = 0
    _pause: float = FIRST_PAUSE_SECONDS
    _open_until: float | None = None
    _trial: bool = False

    @property
    def closed(self) -> bool:
        return self._open_until is None

    def allows(self, now: float) -> bool:
        """Whether a request may be sent now."""
        return self._open_until is None or (now >= self._open_until and not self._trial)

    def sent(self, now: float) -> None:
        """A request was sent: the trial, if the circuit is not closed."""
        if self._open_until is not None and now >= self._open_until:
            self._trial = True

    def succeeded(self) -> None:
        """The server answered, if only to refuse."""
        self._failures = 0
        self._pause = FIRST_PAUSE_SECONDS
        self._open_until = None
        self._trial = False

    def failed(self, now: float) -> None:
        """The server did not answer, or broke off."""
        self._failures += 1
        if self._open_until is not None and not self._trial:
            return  # a request from before the circuit opened
        if self._trial or self._failures >= FAILURES:
            if self._trial:
                self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._open_until = now + self._pause
            self._trial = False

    def gave_up(self) -> None:
        """A request ended without saying anything about the server (its client left)."""
        self._trial = False
