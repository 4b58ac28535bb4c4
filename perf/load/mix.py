"""A mixture of clients: well-behaved, leaving, too slow, wrong. A thread each, one request a time.

Every request has an end that is right for its kind; any other end is a failure, with its reason.
"""

from __future__ import annotations

import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pocket_client import Client
from pocket_client.client import Stream
from pocket_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PocketClientError,
    RequestCancelledError,
)

_WORDS = ("river", "seven", "green", "window", "slowly", "answer", "paper", "north", "child",
          "stone")  # fmt: skip
_SYSTEM = "You answer briefly. " + "Facts matter more than style. " * 12
"""The shared prefix of chat sessions."""
_DEADLINE_SECONDS = 0.2
_WAIT_SECONDS = 120.0
OK = "ok"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it. Times in seconds, ``at`` since the start of the load."""

    kind: str
    at: float
    ended: str = OK
    """``ok``: as it should for its kind; anything else says what went wrong."""
    tokens: int = 0
    ttft: float | None = None
    """First chunk of a request that was read to its end."""
    per_token: float | None = None
    """Mean time per further token of such a request."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the kinds (they need not add up to 1), and sizes."""

    weights: Mapping[str, float] = field(
        default_factory=lambda: {
            "grpc": 6, "http": 3, "chat": 4, "long": 1,
            "leave": 2, "cancel": 1, "deadline": 1, "invalid": 1, "garbage": 1,
        }
    )  # fmt: skip
    max_tokens: int = 64
    long_words: int = 400


class MixedLoad:
    """``users`` threads against one server. ``stop`` ends it after the requests in progress."""

    def __init__(
        self, grpc_address: str, http_url: str, *, users: int, mix: Mix | None = None, seed: int = 0
    ) -> None:
        self._grpc = Client(grpc_address, timeout=_WAIT_SECONDS)
        self._http = Client(http_url, timeout=_WAIT_SECONDS)
        self._http_url = http_url
        self._mix = mix or Mix()
        self._kinds: dict[str, Callable[[random.Random], Outcome]] = {
            "grpc": self._stream_text,
            "http": self._stream_http,
            "chat": self._chat,
            "long": self._long_prompt,
            "leave": self._leave,
            "cancel": self._cancel,
            "deadline": self._deadline,
            "invalid": self._invalid,
            "garbage": self._garbage,
        }
        self._stopped = threading.Event()
        self._started = 0.0
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        self._threads = [
            threading.Thread(target=self._user, args=(random.Random(f"{seed}-{i}"),), daemon=True)
            for i in range(users)
        ]

    def start(self) -> None:
        self._started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Outcome]:
        """Everything that happened, in order of ending."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._grpc.close()
        self._http.close()
        with self._lock:
            return list(self._outcomes)

    def _user(self, draw: random.Random) -> None:
        kinds, weights = list(self._mix.weights), list(self._mix.weights.values())
        while not self._stopped.is_set():
            kind = draw.choices(kinds, weights)[0]
            at = time.monotonic() - self._started
            try:
                outcome = self._kinds[kind](draw)
                outcome = Outcome(kind, at, outcome.ended, outcome.tokens, outcome.ttft,
                                  outcome.per_token)  # fmt: skip
            except (PocketClientError, OSError) as error:
                outcome = Outcome(kind, at, f"{type(error).__name__}: {str(error)[:200]}")
            with self._lock:
                self._outcomes.append(outcome)

    # --- kinds ------------------------------------------------------------------------------------

    def _stream_text(self, draw: random.Random) -> Outcome:
        words, budget = draw.randint(4, 60), draw.randint(1, self._mix.max_tokens)
        return _read(self._grpc.stream(_prompt(draw, words), max_tokens=budget))

    def _stream_http(self, draw: random.Random) -> Outcome:
        words, budget = draw.randint(4, 60), draw.randint(1, self._mix.max_tokens)
        return _read(self._http.stream(_prompt(draw, words), max_tokens=budget))

    def _chat(self, draw: random.Random) -> Outcome:
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _prompt(draw, draw.randint(2, 12))},
        ]
        budget = draw.randint(1, self._mix.max_tokens)
        return _read(self._grpc.chat_stream(messages, max_tokens=budget))

    def _long_prompt(self, draw: random.Random) -> Outcome:
        return _read(self._grpc.stream(_prompt(draw, self._mix.long_words), max_tokens=4))

    def _leave(self, draw: random.Random) -> Outcome:
        """Closes the stream after some chunks."""
        client = draw.choice((self._grpc, self._http))
        chunks = draw.randint(0, 3)
        with client.stream(_prompt(draw, 8), max_tokens=1000, ignore_eos=True) as stream:
            for _ in range(chunks):
                next(stream)
        return Outcome("", 0.0)

    def _cancel(self, draw: random.Random) -> Outcome:
        """Asked for by the request's id, from outside the stream."""
        stream = self._grpc.stream(_prompt(draw, 8), max_tokens=2000, ignore_eos=True)
        next(stream)
        self._grpc.cancel(stream.request_id)
        return _ends_with(stream, RequestCancelledError)

    def _deadline(self, draw: random.Random) -> Outcome:
        stream = self._grpc.stream(
            _prompt(draw, 8), max_tokens=3000, ignore_eos=True, timeout=_DEADLINE_SECONDS
        )
        return _ends_with(stream, DeadlineExceededError)

    def _invalid(self, draw: random.Random) -> Outcome:
        return _ends_with(
            self._grpc.stream([1, 2, draw.randint(10**8, 2 * 10**8)], max_tokens=4),
            InvalidRequestError,
        )

    def _garbage(self, draw: random.Random) -> Outcome:
        """Bytes that are no request (Triton answers 500 to some of them)."""
        request = urllib.request.Request(
            f"{self._http_url}/v2/models/pocketllm/generate",
            data=draw.randbytes(draw.randint(1, 200)),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_WAIT_SECONDS):
                return Outcome("", 0.0, "garbage was answered")
        except urllib.error.HTTPError as error:
            with error:
                return Outcome("", 0.0, OK if error.code in (400, 500) else f"status {error.code}")


def _prompt(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS, k=words))


def _read(stream: Stream) -> Outcome:
    """Read to the end. The text must be there and the counts must agree."""
    began = time.monotonic()
    first: float | None = None
    with stream:
        for _ in stream:
            first = first or time.monotonic()
        ended = time.monotonic()
        completion = stream.completion
    tokens = completion.usage.completion_tokens
    if first is None or tokens != len(completion.token_ids):
        return Outcome(
            "", 0.0, f"{len(completion.token_ids)} tokens came and {tokens} were counted"
        )
    per_token = (ended - first) / (tokens - 1) if tokens > 1 else None
    return Outcome("", 0.0, OK, tokens, first - began, per_token)


def _ends_with(stream: Stream, expected: type[PocketClientError]) -> Outcome:
    try:
        with stream:
            for _ in stream:
                pass
    except expected:
        return Outcome("", 0.0)
    return Outcome("", 0.0, f"ended without {expected.__name__}")
