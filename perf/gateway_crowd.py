"""``python -m perf.gateway_crowd``: many open streams at one gateway, without an error.

``--idle`` event streams that got one chunk and now wait, and ``--active`` ones that stream beside
them, through a gateway process in front of ``perf.scripted_upstream``. Every active stream must be
complete and every idle one still open at the end; then the idle clients leave, and the gateway must
have nothing in flight. Exit status 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from perf.gateway_process import ROOT, Gateway, python_environment, running_gateway
from perf.scripted_upstream import IDLE_SEED, WORD

_LIMIT = 120.0
"""Seconds for any one step."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """What became of the streams."""

    idle: int
    complete: int
    left_in_flight: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--idle", type=int, default=500)
    parser.add_argument("--active", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="of each active stream")
    options = parser.parse_args(arguments)
    crowd = measure(options.idle, options.active, options.tokens)
    print(
        f"{crowd.complete} of {options.active} active streams complete, "
        f"{crowd.idle} of {options.idle} idle ones still open, "
        f"{crowd.left_in_flight:.0f} in flight after they left"
    )
    return int(crowd != Crowd(options.idle, options.active, 0.0))


def measure(idle: int, active: int, tokens: int) -> Crowd:
    """Raises RuntimeError if gateway or upstream do not start."""
    command = [sys.executable, "-m", "perf.scripted_upstream"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=python_environment(), cwd=ROOT
    ) as upstream:
        assert upstream.stdout is not None
        assert upstream.stdin is not None
        try:
            port = int(upstream.stdout.readline())
            limits = ("--max-in-flight", str(idle + active))
            with running_gateway(f"127.0.0.1:{port}", *limits) as gateway:
                return asyncio.run(_crowd(gateway, idle, active, tokens))
        finally:
            upstream.stdin.close()


async def _crowd(gateway: Gateway, idle: int, active: int, tokens: int) -> Crowd:
    waiting = await asyncio.gather(*(_begin(gateway, IDLE_SEED, tokens) for _ in range(idle)))
    answers = await asyncio.gather(
        *(_complete(gateway, seed + 1, tokens) for seed in range(active))
    )
    still = sum(not reader.at_eof() for reader, _ in waiting)
    for _, writer in waiting:
        writer.close()
    left = 1.0
    async with asyncio.timeout(_LIMIT):
        while left:
            left = await _in_flight(gateway)
    return Crowd(still, sum(answers), left)


async def _begin(
    gateway: Gateway, seed: int, tokens: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream of which the first event has arrived."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = {"model": "pocketllm", "prompt": "x", "stream": True, "seed": seed, "max_tokens": tokens}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    async with asyncio.timeout(_LIMIT):
        await reader.readuntil(WORD.encode())
    return reader, writer


async def _complete(gateway: Gateway, seed: int, tokens: int) -> bool:
    """Whether a stream has all its words and a proper end."""
    reader, writer = await _begin(gateway, seed, tokens)
    async with asyncio.timeout(_LIMIT):
        rest = await reader.readuntil(b"[DONE]")
    writer.close()
    return rest.count(WORD.encode()) == tokens - 1 and b'"finish_reason": "length"' in rest


async def _in_flight(gateway: Gateway) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    name = "pocketllm_gateway_generations_in_flight "
    return next(
        float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)
    )


if __name__ == "__main__":
    raise SystemExit(main())
