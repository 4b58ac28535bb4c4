"""The client of all servers alike: streams of ``/v1/completions`` over HTTP/1.1.

A request is sent when the trace says so, however many are open (an open loop): a slow server does
not get fewer requests. Every request has exactly one end in the ledger. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Self
from urllib.parse import urlsplit

from perf.serving.trace import Planned

TIMEOUT_SECONDS = 120.0
_LARGEST_LINE = 2**20


class ServerError(RuntimeError):
    """The server answered with an error, or with something that is no stream of completions."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One request's entry in the ledger. Times in seconds since the start of the run."""

    planned: Planned
    sent: float
    arrivals: tuple[float, ...]
    """When pieces of text came."""
    ended: float
    error: str = ""
    """Empty: all tokens that were asked for came."""

    @property
    def tokens(self) -> int:
        """A request that ended with ``length`` has all of its tokens, however they were packed."""
        return 0 if self.error else self.planned.max_tokens

    @property
    def ttft(self) -> float:
        """From when it should have been sent, so that a late client does not flatter a server."""
        return self.arrivals[0] - self.planned.at

    @property
    def per_output_token(self) -> float:
        """Mean seconds per token after the first; 0 for a single token."""
        if self.planned.max_tokens == 1:
            return 0.0
        return (self.arrivals[-1] - self.arrivals[0]) / (self.planned.max_tokens - 1)

    @property
    def seconds(self) -> float:
        return self.ended - self.planned.at


def run_trace(url: str, trace: Sequence[Planned], options: Mapping[str, object]) -> list[Finished]:
    """Send ``trace`` to the server at ``url`` (with ``options`` in each body); returns the ledger,
    an entry per request in the order of the trace."""

    async def run() -> list[Finished]:
        began = time.monotonic()
        return await asyncio.gather(*(_request(url, item, options, began) for item in trace))

    return asyncio.run(run())


class Client:
    """``run_trace`` in a process of its own, so that its CPU time can be told from anybody else's,
    and what this process does never delays an arrival. Context manager."""

    def __enter__(self) -> Self:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self.pid = self._pool.submit(os.getpid).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def send(
        self, url: str, trace: Sequence[Planned], options: Mapping[str, object]
    ) -> list[Finished]:
        """As ``run_trace``."""
        return self._pool.submit(run_trace, url, trace, options).result()


async def _request(
    url: str, planned: Planned, options: Mapping[str, object], began: float
) -> Finished:
    await asyncio.sleep(planned.at - (time.monotonic() - began))
    sent = time.monotonic() - began
    arrivals: list[float] = []
    reason = error = ""
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            body = {
                "prompt": planned.prompt,
                "max_tokens": planned.max_tokens,
                "temperature": 0,
                "stream": True,
                **options,
            }
            async for event in _events(url, body):
                choice = (event.get("choices") or [{}])[0]
                if choice.get("text"):
                    arrivals.append(time.monotonic() - began)
                reason = choice.get("finish_reason") or reason
    except TimeoutError:
        error = f"no end within {TIMEOUT_SECONDS:.0f} s"
    except (OSError, EOFError, ValueError, ServerError) as problem:
        error = f"{type(problem).__name__}: {str(problem)[:200]}"
    if not error and reason != "length":
        error = f"ended with {reason or 'no reason'} before its last token"
    if not error and not arrivals:
        error = "no text came"
    return Finished(planned, sent, tuple(arrivals), time.monotonic() - began, error)


async def _events(url: str, body: Mapping[str, object]) -> AsyncIterator[Mapping[str, object]]:
    """The events of one answer, up to ``[DONE]``."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(
        address.hostname, address.port, limit=_LARGEST_LINE
    )
    try:
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        status, headers = await _head(reader)
        pieces = _pieces(reader, chunked=headers.get("transfer-encoding", "").lower() == "chunked")
        if status != 200:
            text = b"".join([piece async for piece in pieces])
            raise ServerError(f"status {status}: {text[:200].decode(errors='replace')}")
        pending = b""
        async for piece in pieces:
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(str(event["error"]))
                yield event
        raise ServerError("the stream ended without [DONE]")
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, Mapping[str, str]]:
    first = (await reader.readline()).split(None, 2)
    if len(first) < 2:
        raise ServerError("no answer")
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first[1]), headers


async def _pieces(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes."""
    if not chunked:
        while piece := await reader.read(65536):
            yield piece
        return
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()
