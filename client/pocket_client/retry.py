"""When a request is sent again: only before anything of its answer arrived."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from pocket_client.errors import DeadlineExceededError, PocketClientError, UnavailableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter. ``attempts=1`` never retries."""

    attempts: int = 3
    """In all, the first included."""
    initial_seconds: float = 0.1
    factor: float = 4.0
    maximum_seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts: got {self.attempts}; must be at least 1")
        if not 0 <= self.initial_seconds <= self.maximum_seconds or self.factor < 1:
            raise ValueError(
                "backoff: must be 0 <= initial_seconds <= maximum_seconds, factor >= 1"
            )

    def wait_before(
        self, attempt: int, error: PocketClientError, remaining: float | None
    ) -> float | None:
        """Seconds to wait before ``attempt`` (the second is 2); None: give up with ``error``.

        ``remaining``: seconds until the request's deadline.
        """
        if not isinstance(error, UnavailableError) or attempt > self.attempts:
            return None
        limit = min(self.maximum_seconds, self.initial_seconds * self.factor ** (attempt - 2))
        wait = random.uniform(0.5, 1.0) * limit  # noqa: S311  (jitter)
        return wait if remaining is None or wait < remaining else None


class Attempts:
    """The attempts at one request under one deadline. Not shared between threads."""

    def __init__(self, policy: RetryPolicy, timeout: float | None) -> None:
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ValueError(f"timeout: got {timeout}; must be above 0, or None")
        self._policy = policy
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._attempt = 1
        self.received = False
        """Set by the owner once something of the answer arrived."""

    def remaining(self) -> float | None:
        """Seconds until the deadline.

        Raises:
            DeadlineExceededError: none are left.
        """
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceededError("not finished within the timeout")
        return left

    def wait_after(self, error: PocketClientError) -> float | None:
        """Seconds to wait before the next attempt; None: let the caller see ``error``."""
        if self.received:
            return None
        self._attempt += 1
        left = None if self._deadline is None else self._deadline - time.monotonic()
        return self._policy.wait_before(self._attempt, error, left)
