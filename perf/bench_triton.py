"""``python -m perf.bench_triton``: gRPC streams through the ensemble beside the engine in process.

Workload A (64 tokens in, 128 out) at 1, 8 and 16 streams: every stream of a round is one gRPC
request to the ensemble ``pocketllm``, all sent at once; the same prompts go to a ``UnifiedEngine``
with its text stage.  Both sides are processes of their own that take turns within every round.  The
engine and the client are stopped (``SIGSTOP``) outside their turns.  The server is not, since
Triton may take a stopped stub for a dead one: it idles, and what it uses then counts as foreign
work, of which too much refuses the run.  Bar: at least 85 % of the tokens/s at 8 streams.

The client shares the CPUs with the server, so its CPU seconds stand beside.

Exit status 3: the machine was busy; 4: below the bar, with ``--fail-below-bar``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from perf.bars import END_TO_END_BAR, OURS
from perf.compare import LATENCY_HEADER, latency_rows
from perf.engines.base import EngineFailure, EngineOptions
from perf.engines.environments import CACHE, ROOT
from perf.engines.subprocess_engine import SubprocessEngine
from perf.machine import MachineBusyError
from perf.measure import Bench, Sampled, to_records
from perf.records import Record, figure, find, text_table
from perf.report import update_section
from perf.run_options import (
    EXIT_BELOW_BAR,
    EXIT_BUSY,
    add_run_arguments,
    complain,
    engine_options,
    make_bench,
    model_path,
    run_info,
    write_json,
)
from perf.workloads import Workload, decode_workload

BENCH = "bench_triton"
THROUGH_TRITON = "pocketllm through Triton"
STREAMS = (1, 8, 16)
JUDGED_STREAMS = 8
METRIC = "decode_tokens_per_second"
PARTS = ("client", "tritonserver", "tokenizer", "generator", "detokenizer")
"""Processes of the Triton side, as ``perf.engines.triton`` names them."""


def measure(
    bench: Bench, options: EngineOptions, workloads: Sequence[Workload], rounds: int
) -> list[Record]:
    """Both sides round by round; who begins changes every round.

    Raises:
        EngineFailure: a side does not work, or the two do not choose the same tokens.
    """
    sides = (
        (_worker(OURS, "perf.engines.pocketllm"), {"with_text": True}),
        (_worker(THROUGH_TRITON, "perf.engines.triton"), {}),
    )
    samples: dict[str, list[Sampled]] = {engine.name: [] for engine, _ in sides}
    try:
        for engine, extra in sides:
            engine.start(replace(options, extra={**options.extra, **extra}))
            bench.warm_up(engine, workloads)
        inside, through = (bench.first_tokens(engine) for engine, _ in sides)
        if inside != through:
            raise EngineFailure(f"first tokens differ: {inside} in process, {through} over Triton")
        for index in range(rounds):
            for workload in workloads:
                for engine, _ in sides if index % 2 == 0 else reversed(sides):
                    samples[engine.name] += [
                        with_cpu(sampled, bench)
                        for sampled in bench.sample(engine, workload, index)
                    ]
            print(f"  round {index + 1} of {rounds} done", flush=True)
    finally:
        for engine, _ in sides:
            engine.close()
    return [record for name, found in samples.items() for record in to_records(BENCH, name, found)]


def _worker(name: str, module: str) -> SubprocessEngine:
    log = CACHE / "pocketllm" / f"{module.rpartition('.')[2]}.log"
    return SubprocessEngine(name, sys.executable, module, log=log)


def with_cpu(sampled: Sampled, bench: Bench) -> Sampled:
    """``sampled`` with the CPU seconds of its whole side, and of everything else meanwhile."""
    use = bench.monitor.last
    extra = {
        ("cpu_seconds", "s"): use.own_seconds,
        ("foreign_cpu_ratio", "of the machine"): use.foreign_share,
    }
    return replace(sampled, values={**sampled.values, **extra})


def throughput_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """One row per number of streams: both medians, their ratio, its spread over the rounds."""
    rows = []
    for inside, through in pairs(records):
        ratio = through.value / inside.value
        by_round = [b / a for a, b in zip(inside.samples, through.samples, strict=True)]
        judged = inside.concurrency == JUDGED_STREAMS
        rows.append(
            (
                str(inside.concurrency),
                figure(inside.value),
                figure(through.value),
                f"{ratio:.1%}",
                f"{min(by_round):.1%} .. {max(by_round):.1%}",
                f"{END_TO_END_BAR:.0%}" if judged else "-",
                ("pass" if ratio >= END_TO_END_BAR else "FAIL") if judged else "-",
            )
        )
    return rows


def passed(records: Sequence[Record]) -> bool | None:
    """Whether the bar is reached; None without the judged number of streams."""
    for inside, through in pairs(records):
        if inside.concurrency == JUDGED_STREAMS:
            return through.value / inside.value >= END_TO_END_BAR
    return None


def pairs(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """(in process, through Triton) of every workload that both sides ran."""
    found = []
    for record in records:
        if (record.engine, record.metric) == (OURS, METRIC):
            other = find(records, engine=THROUGH_TRITON, workload=record.workload, metric=METRIC)
            if other is not None:
                found.append((record, other))
    return found


def cpu_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """CPU seconds of a round: in process, then through Triton in all and by process."""

    def median(engine: str, workload: str, metric: str) -> str:
        record = find(records, engine=engine, workload=workload, metric=metric)
        return figure(record.value if record else None)

    return [
        (
            str(inside.concurrency),
            median(OURS, inside.workload, "cpu_seconds"),
            median(THROUGH_TRITON, inside.workload, "cpu_seconds"),
            *(median(THROUGH_TRITON, inside.workload, f"{part}_cpu_seconds") for part in PARTS),
        )
        for inside, _ in pairs(records)
    ]


THROUGHPUT_HEADER = (
    "streams",
    "in process, tokens/s",
    "through Triton, tokens/s",
    "ratio",
    "ratio by round",
    "bar",
    "result",
)
CPU_HEADER = ("streams", "in process, CPU s", "through Triton, CPU s", *PARTS)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m perf.bench_triton", description=__doc__)
    add_run_arguments(parser, rounds=7)
    parser.add_argument(
        "--streams",
        type=lambda text: tuple(map(int, text.split(","))),
        default=STREAMS,
        help="comma list (default: 1,8,16)",
    )
    parser.add_argument("--fail-below-bar", action="store_true", help="exit 4 if it is missed")
    parser.add_argument(
        "--update-docs", action="store_true", help="rewrite the tables in docs/benchmarks.md"
    )
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    model = model_path(arguments.model)
    options = engine_options(arguments, model)
    workloads = [decode_workload(streams) for streams in arguments.streams]
    try:
        bench = make_bench(arguments, model)
        records = measure(bench, options, workloads, arguments.rounds)
    except MachineBusyError as error:
        complain(f"refused: {error}")
        return EXIT_BUSY
    except EngineFailure as error:
        complain(f"failed: {error}")
        return 1
    facts = run_info(arguments, "perf.bench_triton", model, bench, given)
    if arguments.json:
        # Also of a run that is refused below: its file says so, and shows what happened.
        write_json(arguments.json, records, facts)
    if not arguments.allow_busy:
        try:
            bench.require_undisturbed()
        except MachineBusyError as error:
            complain(f"refused: {error}")
            return EXIT_BUSY
    tables = (
        (THROUGHPUT_HEADER, throughput_rows(records)),
        (CPU_HEADER, cpu_rows(records)),
        (LATENCY_HEADER, latency_rows(records)),
    )
    for header, rows in tables:
        print(text_table(header, rows) + "\n")
    print(facts.footer())
    if arguments.update_docs:
        update_section(ROOT / "docs" / "benchmarks.md", BENCH, tables, facts.footer())
    return EXIT_BELOW_BAR if arguments.fail_below_bar and passed(records) is False else 0


if __name__ == "__main__":
    sys.exit(main())
