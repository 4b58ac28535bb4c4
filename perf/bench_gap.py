"""``python -m perf.bench_gap``: the time between two native calls of decode steps.

Workload A at 1, 8 and 16 streams in process, text stage on. A step's *gap* is everything between
the return of one native call and the next: the scheduler, the arguments, text, events to sinks and
the loop. Runs with stamps at the seams tell its parts, and are not counted in the whole.

``--against PYTHON`` runs another checkout beside this one, by the interpreter of its environment
(an editable install): both take turns in every round with the same prompts, and the ratios are of
medians over rounds.

Exit status 3: the machine was busy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from perf.bars import OURS
from perf.engines.base import BatchResult, EngineFailure, EngineOptions
from perf.engines.environments import CACHE, ROOT
from perf.engines.step_times import COMPUTE, GAP, PARTS
from perf.engines.subprocess_engine import SubprocessEngine
from perf.machine import MachineBusyError
from perf.measure import RETRY_ROUND_STEP, SETTLE_SECONDS, Bench
from perf.records import Record, find, text_table
from perf.report import update_section
from perf.run_options import (
    EXIT_BUSY,
    add_run_arguments,
    complain,
    engine_options,
    make_bench,
    model_path,
    run_info,
    write_json,
)
from perf.workloads import decode_workload, figure_of

BENCH = "bench_gap"
OTHER = "other checkout"
STREAMS = (1, 8, 16)

Figures = dict[tuple[str, int, str], list[float]]
"""Medians of rounds by engine, streams and metric."""


def measure(
    bench: Bench, options: EngineOptions, pythons: Mapping[str, str], rounds: int
) -> Figures:
    """Whole gaps of all engines, interleaved; then the parts of ours.

    Raises:
        EngineFailure: an engine could not be started or failed.
    """
    figures: Figures = {}
    whole = replace(options, extra={**options.extra, "with_text": True, "step_times": "gap"})
    engines = {name: _worker(name, python) for name, python in pythons.items()}
    try:
        for engine in engines.values():
            engine.start(whole)
            engine.pause()
        for round_index in range(-1, rounds):  # the first warms up
            for streams in STREAMS:
                for name in engines if round_index % 2 else reversed(engines):
                    result, speed = _run(bench, engines[name], streams, round_index)
                    if round_index >= 0:
                        _take(figures, name, streams, result, (COMPUTE, GAP))
                        key = (name, streams, "decode_tokens_per_second")
                        figures.setdefault(key, []).append(speed)
    finally:
        for engine in engines.values():
            engine.close()
    stamped = _worker(OURS, sys.executable)
    try:
        stamped.start(replace(whole, extra={**whole.extra, "step_times": "parts"}))
        for round_index in range(-1, rounds):
            for streams in STREAMS:
                result, _ = _run(bench, stamped, streams, round_index)
                if round_index >= 0:
                    _take(figures, OURS, streams, result, tuple(PARTS))
    finally:
        stamped.close()
    return figures


def _worker(name: str, python: str) -> SubprocessEngine:
    log = CACHE / "pocketllm" / f"gap-{name.replace(' ', '-')}.log"
    return SubprocessEngine(name, python, "perf.engines.pocketllm", log=log)


def _run(
    bench: Bench, engine: SubprocessEngine, streams: int, round_index: int
) -> tuple[BatchResult, float]:
    workload = decode_workload(streams)
    for attempt in range(bench.retries + 1):
        (batch,) = workload.batches(
            bench.corpus, bench.seed, round_index + attempt * RETRY_ROUND_STEP
        )
        bench.settle(SETTLE_SECONDS)
        engine.resume()
        with bench.monitor.measuring(engine.pid):
            result = engine.run(batch.prompts, batch.max_new_tokens)
        engine.pause()
        if bench.monitor.last_was_quiet() or round_index < 0:
            break
    else:
        bench.disturbed.append(f"{engine.name} {workload.name} round {round_index}")
    (point,) = workload.points
    return result, figure_of(point, batch, result.wall_seconds, result.generated_tokens)


def _take(
    figures: Figures, name: str, streams: int, result: BatchResult, parts: Sequence[str]
) -> None:
    for part in parts:
        values = result.step_seconds.get(part, ())
        if values:
            key = (name, streams, f"{part}_seconds")
            figures.setdefault(key, []).append(statistics.median(values))


def to_records(figures: Figures) -> list[Record]:
    return [
        Record.of(
            BENCH, name, f"A{streams}", streams, metric,
            "tokens/s" if metric.endswith("_per_second") else "s", values,
        )
        for (name, streams, metric), values in figures.items()
    ]  # fmt: skip


HEADER = ("engine, streams", "native call ms", "gap us", "min .. max", "share", "tokens/s")


def rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """One row per engine and number of streams; then the ratios of ours to the other one."""
    made = []
    for record in records:
        if record.metric != f"{GAP}_seconds":
            continue
        where = {"engine": record.engine, "workload": record.workload}
        compute = find(records, **where, metric=f"{COMPUTE}_seconds")
        speed = find(records, **where, metric="decode_tokens_per_second")
        assert compute is not None
        assert speed is not None
        made.append(
            (
                f"{record.engine}, {record.concurrency}",
                f"{compute.value * 1e3:.2f}",
                f"{record.value * 1e6:.0f}",
                f"{min(record.samples) * 1e6:.0f} .. {max(record.samples) * 1e6:.0f}",
                f"{record.value / (record.value + compute.value):.1%}",
                f"{speed.value:.0f}",
            )
        )
        other = {"engine": OTHER, "workload": record.workload}
        gap = find(records, **other, metric=record.metric)
        theirs = find(records, **other, metric="decode_tokens_per_second")
        if record.engine == OURS and gap is not None and theirs is not None:
            ratios = (f"{record.value / gap.value:.2f}x", f"{speed.value / theirs.value:.3f}x")
            made.append((f"ours / other, {record.concurrency}", "", ratios[0], "", "", ratios[1]))
    return made


def part_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Microseconds by part, of runs with stamps."""
    made = []
    for part, meaning in PARTS.items():
        found = [
            find(records, engine=OURS, workload=f"A{streams}", metric=f"{part}_seconds")
            for streams in STREAMS
        ]
        if all(found):
            made.append((meaning, *(f"{item.value * 1e6:.0f}" for item in found if item)))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.bench_gap", description=(__doc__ or "").split("\n", 1)[0]
    )
    add_run_arguments(parser, rounds=5)
    parser.add_argument("--against", metavar="PYTHON", help="another checkout's interpreter")
    parser.add_argument("--update-docs", action="store_true", help="rewrite docs/benchmarks.md")
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    model = model_path(arguments.model)
    pythons = {OURS: sys.executable}
    if arguments.against is not None:
        pythons[OTHER] = arguments.against
    try:
        bench = make_bench(arguments, model)
        figures = measure(bench, engine_options(arguments, model), pythons, arguments.rounds)
        if not arguments.allow_busy:
            bench.require_undisturbed()
    except MachineBusyError as error:
        complain(f"refused: {error}")
        return EXIT_BUSY
    except EngineFailure as error:
        complain(f"failed: {error}")
        return 1
    records = to_records(figures)
    parts_header = ("part of the gap, us", *(f"{streams} streams" for streams in STREAMS))
    tables = [(HEADER, rows(records)), (parts_header, part_rows(records))]
    for header, lines in tables:
        print(text_table(header, lines), end="\n\n")
    if arguments.against is not None:
        given = ["PYTHON" if word == arguments.against else word for word in given]
    facts = run_info(arguments, "perf.bench_gap", model, bench, given)
    print(facts.footer())
    if arguments.json:
        write_json(arguments.json, records, facts)
    if arguments.update_docs:
        update_section(ROOT / "docs" / "benchmarks.md", BENCH, tables, facts.footer())
    return 0


if __name__ == "__main__":
    sys.exit(main())
