"""``python -m perf.bench_affinity``: chats over two servers, by prefix affinity and round robin.

Two Triton servers on this machine, one thread each. Conversations of a few groups share a long
system prompt per group and come in one seeded order, a few at once, through the gateway's own
upstream pool; only the choice of a server differs. Each round has prefixes of its own, so nothing
is cached when it begins. Reported are the share of prompt tokens that were found in a cache, the
time to the first token, and how long the round took.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from perf.records import Record, records_table, write_records
from perf.run_options import model_path
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports
from pocket_client.gateway.discovery import parse_upstreams
from pocket_client.gateway.metrics import Metrics
from pocket_client.gateway.upstreams import Upstream, UpstreamPool
from pocket_client.options import GenerationRequest, chat_request

BENCH = "bench_affinity"
SERVERS = 2
_WORDS = ("river", "seven", "green", "window", "slowly", "answer", "paper", "north", "child",
          "stone", "because", "often", "letter", "under", "simple", "question")  # fmt: skip
_TIMEOUT_SECONDS = 300.0


class RoundRobinPool(UpstreamPool):
    """Every server in turn, whatever the prefix: what a balancer without affinity does."""

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__(parse_upstreams(",".join(addresses)), Metrics())
        self._turn = itertools.count()

    def choose(self, key: bytes, tried: set[str]) -> Upstream:  # noqa: ARG002
        listed = sorted(self.upstreams, key=lambda upstream: upstream.address)
        return listed[next(self._turn) % len(listed)]


class AffinityPool(UpstreamPool):
    """The gateway's own choice."""

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__(parse_upstreams(",".join(addresses)), Metrics())


POOLS: dict[str, type[AffinityPool | RoundRobinPool]] = {
    "affinity": AffinityPool,
    "round robin": RoundRobinPool,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """``groups`` system prompts of ``words`` words; ``questions`` conversations for each."""

    groups: int = 6
    questions: int = 6
    words: int = 400
    tokens: int = 8
    concurrency: int = 4

    def requests(self, name: str, seed: int) -> list[GenerationRequest]:
        """In an order of chance; the same for every policy, with prefixes that ``name`` keeps
        apart. The text is ``words`` long and begins with what tells groups apart."""
        source = random.Random(seed)

        def words(count: int) -> str:
            return " ".join(source.choices(_WORDS, k=count))

        systems = [f"{name}, group {group}: {words(self.words)}" for group in range(self.groups)]
        made = [
            chat_request(
                [
                    {"role": "system", "content": system},
                    {"role": "user", "content": f"{number}: {words(8)}"},
                ],
                {"max_tokens": self.tokens, "temperature": 0.0},
                stream=True,
            )
            for system in systems
            for number in range(self.questions)
        ]
        source.shuffle(made)
        return made


@dataclass(frozen=True, slots=True)
class Figures:
    """One round of one policy. ``ttft``: median seconds to the first token; ``seconds``: until the
    last answer was complete."""

    cached_ratio: float
    ttft: float
    seconds: float


async def run(pool: UpstreamPool, requests: Sequence[GenerationRequest], at_once: int) -> Figures:
    """Send all of them, ``at_once`` at a time.

    Raises:
        PocketClientError: one failed.
    """
    places = asyncio.Semaphore(at_once)

    async def one(request: GenerationRequest) -> tuple[int, int, float]:
        async with places:
            began, first = time.perf_counter(), None
            async with pool.send(request, timeout=_TIMEOUT_SECONDS) as stream:
                async for _ in stream:
                    first = first or time.perf_counter()
            assert first is not None
            usage = stream.completion.usage
            return usage.prompt_tokens, usage.cached_tokens or 0, first - began

    await pool.start()
    began = time.perf_counter()
    try:
        found = await asyncio.gather(*(one(request) for request in requests))
        seconds = time.perf_counter() - began
    finally:
        await pool.aclose()
    prompt, cached = (sum(item[part] for item in found) for part in (0, 1))
    return Figures(cached / prompt, statistics.median(item[2] for item in found), seconds)


def measure(addresses: Sequence[str], workload: Workload, rounds: int) -> dict[str, list[Figures]]:
    """Both policies round by round; who begins changes every round."""
    found: dict[str, list[Figures]] = {name: [] for name in POOLS}
    for index in range(rounds):
        for name in POOLS if index % 2 == 0 else reversed(POOLS):
            requests = workload.requests(f"{name} {index}", seed=index)
            figures = asyncio.run(run(POOLS[name](addresses), requests, workload.concurrency))
            found[name].append(figures)
    return found


def records(found: dict[str, list[Figures]], concurrency: int) -> list[Record]:
    """``cached_token_ratio``, ``ttft_seconds`` and ``round_seconds`` of each policy."""
    made = []
    for name, figures in found.items():
        for metric, unit, values in (
            ("cached_token_ratio", "ratio", [figure.cached_ratio for figure in figures]),
            ("ttft_seconds", "seconds", [figure.ttft for figure in figures]),
            ("round_seconds", "seconds", [figure.seconds for figure in figures]),
        ):
            made.append(Record.of(BENCH, "pocketllm", name, concurrency, metric, unit, values))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    default = Workload()
    parser.add_argument("--model", help="a GGUF file; default: the demo model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=default.groups)
    parser.add_argument("--questions", type=int, default=default.questions)
    parser.add_argument("--words", type=int, default=default.words, help="of a system prompt")
    parser.add_argument("--concurrency", type=int, default=default.concurrency)
    parser.add_argument("--kv-cache-tokens", type=int, default=8192, help="of each server")
    parser.add_argument("--json", type=Path, help="write the records there")
    options = parser.parse_args(argv)
    workload = Workload(options.groups, options.questions, options.words,
                        concurrency=options.concurrency)  # fmt: skip
    environment = {"POCKETLLM_THREADS": "1", "POCKETLLM_MAX_MODEL_LEN": "2048",
                   "POCKETLLM_KV_CACHE_TOKENS": str(options.kv_cache_tokens)}  # fmt: skip
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(
                TritonServer(
                    ServerOptions(str(model_path(options.model)), ports=Ports(0, 0, 0),
                                  environment=environment)
                )
            ).grpc_address
            for _ in range(SERVERS)
        ]  # fmt: skip
        measure(addresses, Workload(1, 2), 1)  # warm-up
        found = measure(addresses, workload, options.rounds)
    made = records(found, workload.concurrency)
    print(records_table(made))
    affinity, other = (
        {record.metric: record.value for record in made if record.workload == name}
        for name in POOLS
    )
    share = affinity["cached_token_ratio"] / max(other["cached_token_ratio"], 1e-9)
    speed, pace = (other[metric] / affinity[metric] for metric in ("ttft_seconds", "round_seconds"))
    print(
        f"affinity / round robin: cached tokens x {share:.2f}, "
        f"time to first token / {speed:.2f}, rounds / {pace:.2f}"
    )
    if options.json is not None:
        write_records(options.json, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
