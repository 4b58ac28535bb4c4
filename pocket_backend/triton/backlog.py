"""How many chunks wait between the generator and the detokenizer, and when that is too many."""

from __future__ import annotations

from collections.abc import Callable

MAX_WAITING = 128
"""Chunks in Triton's queue before further ones are merged: at thousands a second that the
detokenizer does, some 30 ms of delay."""
MAX_HOLD_SECONDS = 2.0
"""A held increment goes out after this time whatever the count says: lost reports must not turn a
stream into one final answer."""


class Backlog:
    """Engine thread only. ``done`` reads the detokenizer's count (``FeedbackListener.done``)."""

    def __init__(self, done: Callable[[], int]) -> None:
        self._done = done
        self._base = 0
        self._sent = 0

    @property
    def waiting(self) -> int:
        return max(0, self._sent - (self._done() - self._base))

    def sent(self) -> None:
        self._sent += 1

    def reset(self) -> None:
        """No stream is open: whatever the counts say, what is left drains by itself."""
        self._base = self._done()
        self._sent = 0

    def full(self) -> bool:
        return self.waiting >= MAX_WAITING
