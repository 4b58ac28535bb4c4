"""A mixture of clients: well-behaved, leaving, too slow, wrong. A thread each, one request a time.

Every request has an end that is right for its kind; any other end is a failure, with its reason.
"""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from pocket_client import Client
from pocket_client.client import Stream
from pocket_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PocketClientError,
    RequestCancelledError,
)
from pocket_client.retry import RetryPolicy

_WORDS = ("river", "seven", "green", "window", "slowly", "answer", "paper", "north", "child",
          "stone")  # fmt: skip
_SYSTEM = "You answer briefly. " + "Facts matter more than style. " * 12
"""The shared prefix of chat sessions."""
_DEADLINE_SECONDS = 0.2
WAIT_SECONDS = 120.0
_NOISE_SECONDS = 0.5
"""How long a client that sent no request at all waits for what the server makes of it."""
_PAUSE_SECONDS = 0.1
"""After an error: clients of a server that is gone would ask it a thousand times a second."""
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
    seconds: float = 0.0
    """From ``at`` to its end."""
    error: str = ""
    """Class of the error that it should not have ended with."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of the kinds (they need not add up to 1), and sizes."""

    weights: Mapping[str, float] = field(
        default_factory=lambda: {
            "grpc": 6, "http": 3, "chat": 4, "long": 1,
            "leave": 2, "cancel": 1, "deadline": 1, "invalid": 1, "garbage": 1,
        }
    )  # fmt: skip
    """Further: ``noise``."""
    max_tokens: int = 64
    long_words: int = 400


class MixedLoad:
    """``users`` threads against one server. ``stop`` ends it after the requests in progress.

    ``wait_seconds``: a client's patience with a request, after which it gives up. ``retry``: how
    clients repeat requests (None: as ``Client`` does).
    """

    def __init__(
        self,
        grpc_address: str,
        http_url: str,
        *,
        users: int,
        mix: Mix | None = None,
        seed: int = 0,
        retry: RetryPolicy | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._wait_seconds = wait_seconds
        self._grpc = Client(grpc_address, timeout=wait_seconds, retry=retry)
        self._http = Client(http_url, timeout=wait_seconds, retry=retry)
        self._grpc_address = grpc_address
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
            "noise": self._noise,
        }
        self._stopped = threading.Event()
        self.started = 0.0
        """``time.monotonic`` of ``start``."""
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()
        self._outcomes: list[Outcome] = []
        self._threads = [
            threading.Thread(target=self._user, args=(random.Random(f"{seed}-{i}"),), daemon=True)
            for i in range(users)
        ]

    def start(self) -> None:
        self.started = time.monotonic()
        for thread in self._threads:
            thread.start()

    def sent(self) -> Counter[str]:
        """Requests by kind, counted before they are sent."""
        with self._lock:
            return Counter(self._sent)

    def stop(self, timeout: float | None = None) -> list[Outcome]:
        """Everything that happened, in order of ending. Requests that are still open after
        ``timeout`` seconds (None: waits for ever) have no outcome."""
        self._stopped.set()
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._grpc.close()
        self._http.close()
        with self._lock:
            return list(self._outcomes)

    def _user(self, draw: random.Random) -> None:
        kinds, weights = list(self._mix.weights), list(self._mix.weights.values())
        while not self._stopped.is_set():
            kind = draw.choices(kinds, weights)[0]
            with self._lock:
                self._sent[kind] += 1
            began = time.monotonic()
            try:
                outcome = self._kinds[kind](draw)
            except (PocketClientError, OSError, http.client.HTTPException) as error:
                name = type(error).__name__
                outcome = Outcome(kind, 0.0, f"{name}: {str(error)[:200]}", error=name)
            outcome = replace(
                outcome, kind=kind, at=began - self.started, seconds=time.monotonic() - began
            )
            with self._lock:
                self._outcomes.append(outcome)
            if outcome.error:
                self._stopped.wait(_PAUSE_SECONDS)

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
            with urllib.request.urlopen(request, timeout=self._wait_seconds):
                return Outcome("", 0.0, "garbage was answered")
        except urllib.error.HTTPError as error:
            with error:
                return Outcome("", 0.0, OK if error.code in (400, 500) else f"status {error.code}")

    def _noise(self, draw: random.Random) -> Outcome:
        """No request at all: bytes on a connection of its own, to either port, then gone."""
        port = draw.choice((self._grpc_address, urlsplit(self._http_url).netloc))
        host, _, number = port.rpartition(":")
        junk = draw.randbytes(draw.randint(1, 2000))
        data = draw.choice(
            (
                junk,
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + junk,
                b"POST /v2/models/pocketllm/generate HTTP/1.1\r\nContent-Length: 9000\r\n\r\n"
                + junk,
            )
        )
        with socket.create_connection(
            (host, int(number)), timeout=self._wait_seconds
        ) as connection:
            connection.settimeout(_NOISE_SECONDS)
            try:
                connection.sendall(data)
                connection.recv(1000)
            except (TimeoutError, ConnectionError):
                pass  # it may wait for more, or close on us: both are sound
        return Outcome("", 0.0)


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
