"""Users for Locust: gRPC streaming, `generate_stream` (SSE), and OpenAI chat through the gateway.

    locust -f perf/locust/locustfile.py --headless -u 8 -t 60s \
        --grpc 127.0.0.1:8001 --http http://127.0.0.1:8000 --openai http://127.0.0.1:9000

Statistics have one line per kind of request (its whole time) and one each of type ``TTFT`` and
``ITL``. A stream that ends badly is a failure. Arrivals are Poisson: a user starts its next request
whether or not the last one has ended. The exit status is 1 if an objective (``--slo-*``) is missed.
"""

from __future__ import annotations

import grpc.experimental.gevent as grpc_gevent
from locust import User, events, task

grpc_gevent.init_gevent()  # before any channel: gRPC then waits as greenlets do

import http.client  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterable, Iterator  # noqa: E402
from typing import Any  # noqa: E402
from urllib.parse import urlsplit  # noqa: E402

import gevent.pool  # noqa: E402

from perf.locust.traffic import Lengths, Session, text  # noqa: E402
from perf.locust.verdict import DEFAULT, Figures, Objectives, misses  # noqa: E402
from pocket_client import Client  # noqa: E402

LENGTHS = Lengths()
ALL = "all streams"
TIMEOUT_SECONDS = 300.0


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    parser.add_argument("--grpc", default="127.0.0.1:8001", help="Triton's gRPC address")
    parser.add_argument("--http", default="http://127.0.0.1:8000", help="Triton's HTTP address")
    parser.add_argument("--openai", default="", help="the gateway's address; none: no such users")
    parser.add_argument(
        "--arrivals", type=float, default=4.0, help="requests per second, all users"
    )
    parser.add_argument("--slo-ttft-p95", type=float, default=DEFAULT.ttft_p95_seconds)
    parser.add_argument("--slo-itl-p99", type=float, default=DEFAULT.inter_token_p99_seconds)
    parser.add_argument("--slo-failures", type=float, default=DEFAULT.failure_ratio)


@events.init.add_listener
def _choose_users(environment: Any, **_: object) -> None:
    if not environment.parsed_options.openai:
        OpenAiUser.weight = 0


class StreamUser(User):
    """Starts requests at exponential intervals, each in a greenlet of its own."""

    abstract = True

    def on_start(self) -> None:
        self.random = random.Random()
        self._running = gevent.pool.Group()

    def on_stop(self) -> None:
        self._running.join(timeout=30)
        self._running.kill()

    def wait_time(self) -> float:
        options = self.environment.parsed_options
        share = options.arrivals / max(1, self.environment.runner.target_user_count)
        return self.random.expovariate(share)

    def begin(self, name: str, chunks: Iterable[str]) -> None:
        """Read a stream (an iterator of texts, which is lazy) in the background."""
        self._running.spawn(self._measure, name, chunks)

    def _measure(self, name: str, chunks: Iterable[str]) -> None:
        began = previous = time.perf_counter()
        size, error = 0, None
        try:
            for count, chunk in enumerate(chunks):
                now = time.perf_counter()
                size += len(chunk)
                self._report("TTFT" if count == 0 else "ITL", ALL, now - previous)
                previous = now
        except Exception as problem:  # noqa: BLE001  (whatever ends a stream badly is a failure)
            error = problem
        self._report("stream", name, time.perf_counter() - began, size, error)

    def _report(
        self, kind: str, name: str, seconds: float, size: int = 0, error: Exception | None = None
    ) -> None:
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=1000 * seconds, response_length=size,
            exception=error, context={},
        )  # fmt: skip


class _TritonUser(StreamUser):
    abstract = True
    address = ""

    def on_start(self) -> None:
        super().on_start()
        self.client = Client(getattr(self.environment.parsed_options, self.address),
                             timeout=TIMEOUT_SECONDS)  # fmt: skip

    def on_stop(self) -> None:
        super().on_stop()
        self.client.close()

    def stream(self, prompt: str, tokens: int, leave_after: int | None = None) -> Iterator[str]:
        with self.client.stream(prompt, max_tokens=tokens) as chunks:
            for count, chunk in enumerate(chunks):
                yield chunk.text
                if leave_after is not None and count >= leave_after:
                    return

    @task(12)
    def answer(self) -> None:
        words, tokens = LENGTHS.draw(self.random)
        self.begin(f"{self.address} answer", self.stream(text(self.random, words), tokens))

    @task(1)
    def long_context(self) -> None:
        self.begin(f"{self.address} long", self.stream(text(self.random, LENGTHS.prompt_max), 8))

    @task(1)
    def leave_early(self) -> None:
        stream = self.stream(text(self.random, 8), 1000, self.random.randint(0, 5))
        self.begin(f"{self.address} leaves", stream)


class GrpcUser(_TritonUser):
    """gRPC streaming through the ensemble."""

    weight = 3
    address = "grpc"


class SseUser(_TritonUser):
    """Server-sent events of `generate_stream`."""

    weight = 2
    address = "http"


class OpenAiUser(StreamUser):
    """Chat sessions of a few turns whose system prompt all users share."""

    weight = 2

    @task
    def session(self) -> None:
        self._running.spawn(self._converse, Session(self.random, self.random.randint(1, 4)))

    def _converse(self, session: Session) -> None:
        for messages in session.questions():
            answer: list[str] = []
            self._measure("openai chat", self._chat(messages, answer))
            if not answer:
                return
            session.answered("".join(answer))

    def _chat(self, messages: list[dict[str, str]], answer: list[str]) -> Iterator[str]:
        address = urlsplit(self.environment.parsed_options.openai)
        _, tokens = LENGTHS.draw(self.random)
        body = {"model": "pocketllm", "messages": messages, "stream": True, "temperature": 0,
                "max_tokens": tokens}  # fmt: skip
        connection = http.client.HTTPConnection(address.netloc, timeout=TIMEOUT_SECONDS)
        try:
            headers = {"Content-Type": "application/json"}
            if key := os.environ.get("OPENAI_API_KEY"):
                headers["Authorization"] = f"Bearer {key}"
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read(300)!r}")
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    piece = event["choices"][0]["delta"].get("content") or ""
                    if piece:
                        answer.append(piece)
                        yield piece
            raise RuntimeError("the stream ended without [DONE]")
        finally:
            connection.close()


@events.quitting.add_listener
def _judge(environment: Any, **_: object) -> None:
    options, stats = environment.parsed_options, environment.stats
    streams = [entry for key, entry in stats.entries.items() if key[1] == "stream"]
    ttft, itl = stats.get(ALL, "TTFT"), stats.get(ALL, "ITL")
    figures = Figures(
        requests=sum(entry.num_requests for entry in streams),
        failures=sum(entry.num_failures for entry in streams),
        ttft_p95_seconds=_percentile(ttft, 0.95),
        inter_token_p99_seconds=_percentile(itl, 0.99),
    )
    objectives = Objectives(options.slo_ttft_p95, options.slo_itl_p99, options.slo_failures)
    missed = misses(figures, objectives)
    for sentence in missed:
        logging.error("objective missed: %s", sentence)
    if not missed:
        logging.info("all objectives met: %s", figures)
    environment.process_exit_code = 1 if missed else 0


def _percentile(entry: Any, share: float) -> float | None:
    if entry.num_requests == 0:
        return None
    return float(entry.get_response_time_percentile(share)) / 1000
