"""``python -m perf.metrics_overhead``: what metrics cost, end to end through Triton.

Two servers, one with metrics and one without (``--allow-metrics=false``), take turns under the same
load: ``--streams`` concurrent gRPC streams through the ensemble. While its turn lasts, the one
with metrics is scraped once a second. The figure is the median over the rounds of each round's
ratio, so drift of the machine falls out; the order of the two changes from round to round.

The bar is met only if the whole 95 % interval of that median is below it: a median that lies there
by chance proves nothing. A round that other processes disturbed is repeated, and one that stays
disturbed refuses the run. Before any verdict the first server must have counted the tokens that
its clients read, and the second must have no endpoint.

Exit status 3: the machine was busy; 4: not within the bar (above it, or undecided), with
``--fail-below-bar``; 1: a server was not what it should be.
"""

from __future__ import annotations

import argparse
import math
import re
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
RETRIES = 3
"""Of a round that other processes disturbed."""
_COUNTERS_SECONDS = 20.0


class SidesError(RuntimeError):
    """A comparison of two servers that do not differ as they should."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens per second with and without metrics, of one round."""

    on: float
    off: float

    @property
    def cost(self) -> float:
        return 1.0 - self.on / self.off


@dataclass(frozen=True, slots=True)
class Verdict:
    """The median cost with its 95 % interval (None: too few rounds for one)."""

    cost: float
    interval: tuple[float, float] | None

    @property
    def within(self) -> bool:
        """Certainly below the bar, and a cost that can be: metrics do not speed anything up."""
        return self.interval is not None and self.interval[1] < BAR and self.interval[1] > -BAR

    def __str__(self) -> str:
        if self.interval is None:
            word, spread = "UNDECIDED: too few rounds for", "no interval"
        else:
            low, high = self.interval
            spread = f"95 % interval {low:.2%} to {high:.2%}"
            word = "UNDECIDED (more rounds, a quieter machine):"
            if self.within:
                word = "within"
            elif low >= BAR:
                word = "ABOVE"
            elif high <= -BAR:
                word = "UNSOUND, metrics cannot speed it up:"
        return f"metrics cost {self.cost:.2%} of throughput ({spread}): {word} the bar of {BAR:.0%}"


def judge(turns: Sequence[Turn]) -> Verdict:
    costs = [turn.cost for turn in turns]
    return Verdict(statistics.median(costs), median_interval(costs))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """At least 95 % sure to hold the median of what ``values`` were drawn from, whatever its shape:
    between the k-th value from either end, as in a sign test. None for fewer than six values."""
    count = len(values)
    tail, rank = 0.0, 0
    while rank < count and (tail := tail + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    if rank == 0:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="a GGUF file, or `fake`; default: the demo model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=192, help="per stream and turn")
    parser.add_argument("--rounds", type=int, default=16, help="at least 6 (default 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--allow-busy", action="store_true", help="although others use the CPU")
    parser.add_argument("--fail-below-bar", action="store_true", help="exit 4 unless surely met")
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
    except SidesError as error:
        print(f"{BENCH}: {error}", file=sys.stderr)
        return 1
    records = to_records(turns, options.streams)
    print(records_table(records))
    verdict = judge(turns)
    if options.allow_busy:
        print("\nNOT FOR PUBLICATION: run with --allow-busy")
    print(f"\n{verdict}")
    print(describe_machine().summary())
    if options.json is not None:
        write_records(options.json, records)
    return EXIT_BELOW_BAR if options.fail_below_bar and not verdict.within else 0


def measure(model: str, options: argparse.Namespace) -> list[Turn]:
    """Raises MachineBusyError unless the machine is quiet all the time or ``allow_busy`` is set,
    and SidesError if a server is not what it should be."""
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
        check_sides(on.metrics_url, off.metrics_url, options.streams * options.tokens)
        turns = []
        for index in range(options.rounds):
            order = (on, off) if index % 2 == 0 else (off, on)
            turns.append(_round(monitor, order, on, options))
    return turns


def _round(
    monitor: BusyMonitor,
    order: Sequence[TritonServer],
    on: TritonServer,
    options: argparse.Namespace,
) -> Turn:
    """One undisturbed round."""
    for _ in range(1 if options.allow_busy else 1 + RETRIES):
        figures = {}
        quiet = True
        for server in order:
            with monitor.measuring():
                figures[server is on] = run(server, options, scrape=server is on)
            quiet = quiet and monitor.last_was_quiet()
        if quiet or options.allow_busy:
            return Turn(figures[True], figures[False])
    raise MachineBusyError(f"after {RETRIES} repeats of a round {monitor.complaint()}")


def check_sides(on: str, off: str, tokens: int) -> None:
    """Raises SidesError unless ``on`` counted ``tokens`` and ``off`` has no metrics to read."""
    wanted = re.compile(r'pocket_tokens_total\{type="generated"\} (\S+)')
    deadline = time.monotonic() + _COUNTERS_SECONDS
    while True:
        with urllib.request.urlopen(on, timeout=20) as answer:
            found = wanted.search(answer.read().decode())
        if found and float(found[1]) >= tokens:
            break
        if time.monotonic() > deadline:
            counted = found[1] if found else "nothing"
            raise SidesError(f"the server with metrics counted {counted} of {tokens} tokens")
        time.sleep(0.2)
    try:
        with urllib.request.urlopen(off, timeout=20):
            raise SidesError("the server that should have no metrics serves them")
    except OSError:
        pass  # refused, as it should be


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
