"""``python -m perf.bench_gateway``: what the OpenAI gateway adds to gRPC, in one run.

One server, one gateway in front of it. *Time to first token*: single requests by turns, direct and
through the gateway, with the same prompt, so that both find it in the prefix cache; judged is the
median of the pairs' differences (bar: 3 ms). *CPU per token*: ``--streams`` streams at once, by
turns; judged is the median of the rounds' ratios of CPU seconds per token of server and gateway
together to those of the server alone when asked directly (bar: 10 % more). The client's CPU is not
counted: it is another program on either side.

Exit status 3: the machine was busy; 4: above a bar, with ``--fail-above-bar``.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from perf.gateway_process import Gateway, cpu_seconds, running_gateway
from perf.machine import BusyMonitor, MachineBusyError, describe_machine
from perf.records import Record, records_table, write_records
from perf.run_options import EXIT_BELOW_BAR, EXIT_BUSY
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.liveness import find_processes
from pocket_backend.triton.ports import Ports
from pocket_backend.triton.settings import find_default_model
from pocket_client import Client

BENCH = "bench_gateway"
TTFT_BAR_SECONDS = 0.003
CPU_BAR = 0.10
PROMPT = "Once upon a time there was a fox who lived at the edge of a wide forest, and"
_TIMEOUT = 600.0
Ask = Callable[[int, int], tuple[float, int]]
"""(number, tokens) -> (seconds to the first token, tokens received), of one stream."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Samples of one run: seconds of each request, CPU seconds per token of each round."""

    direct_ttft: tuple[float, ...]
    gateway_ttft: tuple[float, ...]
    direct_cpu: tuple[float, ...]
    gateway_cpu: tuple[float, ...]

    @property
    def added_ttft(self) -> float:
        pairs = zip(self.direct_ttft, self.gateway_ttft, strict=True)
        return statistics.median(through - direct for direct, through in pairs)

    @property
    def added_cpu(self) -> float:
        pairs = zip(self.direct_cpu, self.gateway_cpu, strict=True)
        return statistics.median(through / direct for direct, through in pairs) - 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="a GGUF file, or `fake`; default: the demo model")
    parser.add_argument("--requests", type=int, default=100, help="pairs for the first token")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="per stream and turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--allow-busy", action="store_true", help="although others use the CPU")
    parser.add_argument("--fail-above-bar", action="store_true")
    options = parser.parse_args(arguments)
    model = options.model or find_default_model()
    if model is None:
        print(f"{BENCH}: no model; give --model FILE.gguf or --model fake", file=sys.stderr)
        return 2
    try:
        if not options.allow_busy:
            BusyMonitor().require_quiet()
        figures = measure(str(model), options)
    except MachineBusyError as error:
        print(f"{BENCH}: {error}", file=sys.stderr)
        return EXIT_BUSY
    records = to_records(figures, options.streams)
    print(records_table(records))
    if options.allow_busy:
        print("\nNOT FOR PUBLICATION: run with --allow-busy")
    slow, costly = figures.added_ttft > TTFT_BAR_SECONDS, figures.added_cpu > CPU_BAR
    share = figures.added_ttft / statistics.median(figures.direct_ttft)
    print(
        f"\nthe gateway adds {1000 * figures.added_ttft:.2f} ms ({share:.0%}) to the first token: "
        f"{'ABOVE' if slow else 'within'} the bar of 3 ms\n"
        f"and {figures.added_cpu:.1%} CPU per token at {options.streams} streams: "
        f"{'ABOVE' if costly else 'within'} the bar of {CPU_BAR:.0%}"
    )
    print(describe_machine().summary())
    if options.json is not None:
        write_records(options.json, records)
    return EXIT_BELOW_BAR if options.fail_above_bar and (slow or costly) else 0


def measure(model: str, options: argparse.Namespace) -> Figures:
    """Both sides by turns; which is first changes every time."""
    server = TritonServer(ServerOptions(model, ports=Ports(0, 0, 0)))
    with (
        server,
        running_gateway(server.grpc_address) as gateway,
        Client(server.grpc_address, timeout=_TIMEOUT) as client,
        ThreadPoolExecutor(options.streams) as pool,
    ):
        asks: tuple[Ask, Ask] = (_direct(client), _through(gateway))
        own = tuple(find_processes(server.server_id).values())
        processes = own, (*own, gateway.pid)
        ttft: tuple[list[float], list[float]] = ([], [])
        cpu: tuple[list[float], list[float]] = ([], [])
        for ask in asks:  # warm-up
            _load(pool, ask, options.streams, 16)
        for index in range(options.requests):
            for side in _order(index):
                ttft[side].append(asks[side](0, 2)[0])
        for index in range(options.rounds):
            for side in _order(index):
                before = cpu_seconds(processes[side])
                tokens = _load(pool, asks[side], options.streams, options.tokens)
                used = cpu_seconds(processes[side]) - before
                cpu[side].append(used / tokens)
            print(f"  round {index + 1} of {options.rounds} done", flush=True)
    return Figures(*map(tuple, (*ttft, *cpu)))


def _order(index: int) -> tuple[int, int]:
    return (0, 1) if index % 2 == 0 else (1, 0)


def _load(pool: ThreadPoolExecutor, ask: Ask, streams: int, tokens: int) -> int:
    """Tokens that all streams received."""
    return sum(count for _, count in pool.map(lambda number: ask(number, tokens), range(streams)))


def _direct(client: Client) -> Ask:
    def ask(number: int, tokens: int) -> tuple[float, int]:
        began = time.perf_counter()
        first = 0.0
        options = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
        with client.stream(f"{PROMPT} {number}", **options) as stream:  # type: ignore[arg-type]
            for _ in stream:
                first = first or time.perf_counter() - began
            return first, stream.completion.usage.completion_tokens

    return ask


def _through(gateway: Gateway) -> Ask:
    def ask(number: int, tokens: int) -> tuple[float, int]:
        body = {
            "model": "pocketllm",
            "prompt": f"{PROMPT} {number}",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=_TIMEOUT)
        connection.connect()  # as the channel of the direct side is open already
        began = time.perf_counter()
        first = 0.0
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        used = 0
        for line in connection.getresponse():
            first = first or time.perf_counter() - began
            if b'"completion_tokens"' in line:
                used = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
        connection.close()
        return first, used

    return ask


def to_records(figures: Figures, streams: int) -> list[Record]:
    """Both sides' samples."""
    found = []
    for engine, ttft, cpu in (
        ("direct gRPC", figures.direct_ttft, figures.direct_cpu),
        ("gateway", figures.gateway_ttft, figures.gateway_cpu),
    ):
        found.append(Record.of(BENCH, engine, "one request", 1, "ttft_seconds", "s", ttft))
        found.append(
            Record.of(BENCH, engine, "streams", streams, "cpu_seconds_per_token", "s", cpu)
        )
    return found


if __name__ == "__main__":
    raise SystemExit(main())
