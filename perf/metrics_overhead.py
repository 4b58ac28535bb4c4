"""``python -m perf.metrics_overhead``: what metrics cost, end to end through Triton.

Two servers, one with metrics and one without (``--allow-metrics=false``), take turns under the same
load: ``--streams`` concurrent gRPC streams through the ensemble. While its turn lasts, the one
with metrics is scraped once a second. The figure is the median over the rounds of each round's
ratio, so drift of the machine falls out; the order of the two changes from round to round.

Exit status 3: the machine was busy; 4: above the bar, with ``--fail-below-bar``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from perf.machine import BusyMonitor, MachineBusyError, describe_machine
from perf.records import Record, records_table, write_records
from perf.run_options import EXIT_BELOW_BAR, EXIT_BUSY
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports
from pocket_backend.triton.settings import FAKE_MODEL, find_default_model
from pocket_client import Client

BENCH = "metrics_overhead"
BAR = 0.02
"""Largest share of throughput that metrics may cost."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens per second with and without metrics, of one round."""

    on: float
    off: float

    @property
    def cost(self) -> float:
        return 1.0 - self.on / self.off


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="a GGUF file, or `fake`; default: the demo model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=192, help="per stream and turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--allow-busy", action="store_true", help="although others use the CPU")
    parser.add_argument("--fail-below-bar", action="store_true")
    options = parser.parse_args(arguments)
    model = options.model or find_default_model()
    if model is None:
        print(f"{BENCH}: no model; give --model FILE.gguf or --model fake", file=sys.stderr)
        return 2
    try:
        turns = measure(str(model), options)
    except MachineBusyError as error:
        print(f"{BENCH}: {error}", file=sys.stderr)
        return EXIT_BUSY
    records = to_records(turns, options.streams)
    print(records_table(records))
    cost = statistics.median(turn.cost for turn in turns)
    verdict = "within" if cost < BAR else "ABOVE"
    if options.allow_busy:
        print("\nNOT FOR PUBLICATION: run with --allow-busy")
    print(f"\nmetrics cost {cost:.2%} of throughput: {verdict} the bar of {BAR:.0%}")
    print(describe_machine().summary())
    if options.json is not None:
        write_records(options.json, records)
    return EXIT_BELOW_BAR if options.fail_below_bar and cost >= BAR else 0


def measure(model: str, options: argparse.Namespace) -> list[Turn]:
    """Raises MachineBusyError unless the machine is quiet or ``allow_busy`` is set."""
    monitor = BusyMonitor()
    if not options.allow_busy:
        monitor.require_quiet()
    environment = {}
    if model == FAKE_MODEL:
        environment["POCKETLLM_FAKE_OPTIONS"] = '{"delay_seconds": 0.002}'
    with ExitStack() as stack:
        on, off = (
            stack.enter_context(
                TritonServer(
                    ServerOptions(
                        model, ports=Ports(0, 0, 0), environment=environment, extra_args=extra
                    )
                )
            )
            for extra in ((), ("--allow-metrics=false",))
        )
        for server in (on, off):
            run(server, options)  # warm-up
        turns = []
        for index in range(options.rounds):
            order = (on, off) if index % 2 == 0 else (off, on)
            figures = {id(server): run(server, options, scrape=server is on) for server in order}
            turns.append(Turn(figures[id(on)], figures[id(off)]))
    return turns


def run(server: TritonServer, options: argparse.Namespace, *, scrape: bool = False) -> float:
    """Tokens per second of one turn."""
    ended = threading.Event()
    scraper = threading.Thread(target=_scrape, args=(server.metrics_url, ended), daemon=True)
    with (
        Client(server.grpc_address, timeout=600.0) as client,
        ThreadPoolExecutor(options.streams) as pool,
    ):
        if scrape:
            scraper.start()
        began = time.perf_counter()
        counts = pool.map(
            lambda index: _read(client, f"Tell story number {index}.", options.tokens),
            range(options.streams),
        )
        tokens = sum(counts)
        seconds = time.perf_counter() - began
        ended.set()
        if scrape:
            scraper.join()
    return tokens / seconds


def _read(client: Client, prompt: str, tokens: int) -> int:
    with client.stream(prompt, max_tokens=tokens, ignore_eos=True) as stream:
        for _ in stream:
            pass
        return stream.completion.usage.completion_tokens


def _scrape(url: str, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        with urllib.request.urlopen(url, timeout=20) as answer:
            answer.read()


def to_records(turns: Sequence[Turn], streams: int) -> list[Record]:
    def record(metric: str, unit: str, samples: list[float], engine: str = "pocketllm") -> Record:
        return Record.of(BENCH, engine, "metrics", streams, metric, unit, samples)

    return [
        record("decode_tokens_per_second", "tokens/s", [turn.on for turn in turns]),
        record("decode_tokens_per_second", "tokens/s", [turn.off for turn in turns],
               "pocketllm without metrics"),
        record("cost_ratio", "of throughput", [turn.cost for turn in turns]),
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
