"""Users who chat through the gateway of a compose project, one streamed answer after the other."""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from compose_project import WAIT, ComposeProject

LONG = "Read this first: " + "the river is wide and the stones are round. " * 20


def conversation(number: int) -> str:
    """How a conversation begins: different from the others in its first words, then long."""
    return f"Conversation {number}. {LONG}"


@dataclass
class Stream:
    """How one streamed chat went. Times are seconds of ``time.monotonic``."""

    conversation: int
    sent: float
    first: float | None = None
    """When its first event came; None: the request had not begun to stream."""
    end: str = "broke off"
    """``done``, ``error event``, or what else happened."""
    cached: float | None = None
    """Share of the prompt's tokens that a server had cached, if the answer was complete."""


class ChatLoad:
    """``users`` threads for as long as the context lasts; ``streams`` grows meanwhile.

    Each has ``conversations`` of its own and goes through them again and again.
    """

    def __init__(
        self, project: ComposeProject, users: int, conversations: int, max_tokens: int = 24
    ) -> None:
        self._project = project
        self._users = users
        self._conversations = conversations
        self._max_tokens = max_tokens
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(users)
        self._running: list[Future[None]] = []
        self.streams: list[Stream] = []

    def __enter__(self) -> Self:
        self._running = [self._pool.submit(self._chat, number) for number in range(self._users)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving.set()
        try:
            for user in self._running:
                user.result(WAIT)
        finally:
            self._pool.shutdown()

    def all_done(self, times: int, since: float = 0.0) -> bool:
        """Whether each conversation has ``times`` complete streams that were sent since then."""
        with self._lock:
            complete = Counter(stream.conversation for stream in self.streams
                               if stream.end == "done" and stream.sent >= since)  # fmt: skip
        numbers = range(self._users * self._conversations)
        return all(complete[number] >= times for number in numbers)

    def _chat(self, user: int) -> None:
        for turn in itertools.count():
            if self._leaving.is_set():
                return
            number = user * self._conversations + turn % self._conversations
            stream = Stream(number, time.monotonic())
            with self._lock:
                self.streams.append(stream)
            try:
                self._follow(stream)
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                stream.end = repr(error)

    def _follow(self, stream: Stream) -> None:
        events = self._project.chat_events(
            conversation(stream.conversation), max_tokens=self._max_tokens,
            stream_options={"include_usage": True},
        )  # fmt: skip
        for event in events:
            if event is None:
                stream.end = "done"
            elif "error" in event:
                stream.end = "error event"
            else:
                stream.first = stream.first or time.monotonic()
                usage = event.get("usage")
                if usage is not None:
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
                    stream.cached = cached / usage["prompt_tokens"]


def hit_rate(streams: Iterable[Stream]) -> float:
    """Mean share of cached prompt tokens. Raises ValueError if no stream is complete."""
    shares = [stream.cached for stream in streams if stream.cached is not None]
    if not shares:
        raise ValueError("no stream is complete")
    return sum(shares) / len(shares)


def longest_wait(streams: Iterable[Stream]) -> float:
    """Seconds to the first event, the most that one of ``streams`` took."""
    return max(stream.first - stream.sent for stream in streams if stream.first is not None)
