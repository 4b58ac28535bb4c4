"""``python -m perf.bench_engine``: our engine in process on workloads A, B and C, beside its bars.

Also: the share of the memory-bandwidth limit that one stream reaches, the scaling from 1 to 8
streams, what the prefix cache is worth, and memory and load time in fresh processes.

Exit status 3: the machine was busy; 4: below a bar, with ``--fail-below-bar``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perf.bandwidth import bytes_per_decode_step, read_bandwidth_apart
from perf.bars import (
    BANDWIDTH_BAR,
    CACHE_BAR,
    LOAD_SECONDS_BAR,
    OURS,
    OURS_UNCACHED,
    SCALING_BAR,
    memory_limit,
)
from perf.engines.base import EngineFailure, EngineOptions
from perf.engines.environments import CACHE, ROOT
from perf.engines.pocketllm import PocketLLMEngine
from perf.engines.subprocess_engine import SubprocessEngine
from perf.machine import MachineBusyError
from perf.measure import Bench, Sampled, to_records
from perf.records import Record, figure, find, text_table
from perf.report import update_section
from perf.run_options import (
    EXIT_BELOW_BAR,
    EXIT_BUSY,
    add_arguments,
    complain,
    engine_options,
    make_bench,
    model_path,
    run_info,
    uncached,
    write_json,
)
from perf.workloads import DECODE_NEW, DECODE_PROMPT, Workload, select_workloads

BENCH = "bench_engine"
FRESH_PROCESS_KV_TOKENS = 4608
"""A small pool, so that the KV term does not hide what weights and workspace take."""
LOADS = 3


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of the summary; ``higher`` says which side of ``limit`` is good."""

    name: str
    value: float
    limit: float
    unit: str
    higher: bool

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.higher else self.value <= self.limit

    def row(self) -> tuple[str, str, str, str]:
        relation = "at least" if self.higher else "at most"
        return (
            self.name,
            f"{figure(self.value)} {self.unit}".strip(),
            f"{relation} {figure(self.limit)}",
            "pass" if self.passed else "FAIL",
        )


def measure_workloads(
    bench: Bench, options: EngineOptions, workloads: Sequence[Workload], rounds: int
) -> tuple[list[Record], Mapping[str, object]]:
    """All workloads with the prefix cache, C also without; returns records and the engine's facts.

    The two engines run one after the other, so that only one holds memory.
    """
    records: list[Record] = []
    info: Mapping[str, object] = {}
    shared = [workload for workload in workloads if workload.family == "C"]
    for name, chosen, settings in (
        (OURS, workloads, options),
        (OURS_UNCACHED, shared, uncached(options)),
    ):
        if not chosen:
            continue
        engine = PocketLLMEngine(name)
        try:
            facts = engine.start(settings)
            info = info or facts
            bench.warm_up(engine, chosen)
            samples: list[Sampled] = []
            for round_index in range(rounds):
                for workload in chosen:
                    samples += bench.sample(engine, workload, round_index)
        finally:
            engine.close()
        records += to_records(BENCH, name, samples)
    return records, info


def bandwidth_records(
    bench: Bench,
    options: EngineOptions,
    records: Sequence[Record],
    info: Mapping[str, object],
) -> list[Record]:
    """Share of the read-bandwidth limit in decode steps at one stream (prefill not counted)."""
    step = find(records, engine=OURS, workload="A1", metric="inter_token_seconds")
    model = Path(options.model)
    if step is None or not model.is_file():
        return []
    kv_bytes = float(info["kv_cache_bytes"]) / options.kv_cache_tokens  # type: ignore[arg-type]
    context = DECODE_PROMPT + DECODE_NEW / 2
    read = bytes_per_decode_step(model, context, kv_bytes)
    with bench.monitor.measuring():
        limit = read_bandwidth_apart(int(read), options.threads)
    if not bench.monitor.last_was_quiet():
        bench.disturbed.append("read bandwidth")
    large = read_bandwidth_apart(10**9, options.threads, passes=3)

    def record(workload: str, metric: str, value: float, unit: str) -> Record:
        return Record(BENCH, OURS, workload, 1, metric, value, unit, (value,))

    return [
        record("memory 1 GB", "read_bytes_per_second", large.best, "B/s"),
        record("memory step", "read_bytes_per_second", limit.best, "B/s"),
        record("A1", "bytes_per_step", read, "B"),
        Record.of(
            BENCH,
            OURS,
            "A1",
            1,
            "bandwidth_limit_ratio",
            "ratio",
            [read / seconds / limit.best for seconds in step.samples],
        ),
    ]


def fresh_process_records(bench: Bench, options: EngineOptions) -> list[Record]:
    """Load time (file evicted from and then in the page cache) and resident memory.

    Each figure comes from a new process with the text stage on, as the Triton generator runs it.
    """
    settings = replace(
        options,
        kv_cache_tokens=FRESH_PROCESS_KV_TOKENS,
        extra={**options.extra, "with_text": True},
    )
    loads: dict[str, list[float]] = {"load cold": [], "load warm": []}
    memory: list[float] = []
    limit = 0.0
    for kind in ("load cold", *["load warm"] * LOADS):
        if kind == "load cold":
            _evict(Path(options.model))
        engine = SubprocessEngine(
            OURS,
            sys.executable,
            "perf.engines.pocketllm",
            log=CACHE / "pocketllm" / "worker.log",
        )
        try:
            with bench.monitor.measuring():
                info = engine.start(settings)
            if not bench.monitor.last_was_quiet():
                bench.disturbed.append(kind)
            loads[kind].append(float(info["load_seconds"]))  # type: ignore[arg-type]
            # Touches the workspace and some of the pool.
            engine.run([list(range(1, 201))], 8)
            memory.append(float(engine.memory()))
        finally:
            engine.close()
        limit = memory_limit(int(info["weight_bytes"]), int(info["kv_cache_bytes"]))  # type: ignore[call-overload]
    return [
        *(
            Record.of(BENCH, OURS, kind, 1, "load_seconds", "s", samples)
            for kind, samples in loads.items()
        ),
        Record.of(BENCH, OURS, "memory", 1, "resident_memory_bytes", "B", memory),
        Record(BENCH, OURS, "memory", 1, "resident_memory_limit_bytes", limit, "B", (limit,)),
    ]


def _evict(path: Path) -> None:
    """Ask the kernel to drop a file from its page cache."""
    if not path.is_file():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def bars(records: Sequence[Record]) -> list[Bar]:
    """The bars that can be judged from ``records`` without a peer."""

    def value(workload: str, metric: str | None = None, engine: str = OURS) -> float | None:
        record = find(records, engine=engine, workload=workload, metric=metric)
        return None if record is None else record.value

    found: list[Bar] = []
    one, eight = value("A1", "decode_tokens_per_second"), value("A8", "decode_tokens_per_second")
    if one and eight:
        found.append(Bar("scaling, 8 streams over 1", eight / one, SCALING_BAR, "x", higher=True))
    share = value("A1", "bandwidth_limit_ratio")
    if share is not None:
        found.append(Bar("share of bandwidth limit, 1 stream", share, BANDWIDTH_BAR, "", True))
    for kind in ("C cold", "C warm"):
        cached, plain = value(kind), value(kind, engine=OURS_UNCACHED)
        if cached and plain:
            found.append(Bar(f"{kind}, over cache off", plain / cached, CACHE_BAR, "x", True))
    resident = value("memory", "resident_memory_bytes")
    limit = value("memory", "resident_memory_limit_bytes")
    if resident is not None and limit is not None:
        found.append(Bar("resident memory", resident / 1e6, limit / 1e6, "MB", higher=False))
    load = value("load warm")
    if load is not None:
        found.append(Bar("load, file cached", load, LOAD_SECONDS_BAR, "s", higher=False))
    return found


def workload_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """One row per workload: its figure, its spread, and latencies where there are any."""
    rows = []
    main_metrics = ("decode_tokens_per_second", "prefill_tokens_per_second", "wall_seconds")
    for record in records:
        if record.metric not in main_metrics:
            continue
        name = record.workload if record.engine == OURS else f"{record.workload}, cache off"
        extra = [
            find(records, engine=record.engine, workload=record.workload, metric=metric)
            for metric in ("ttft_seconds", "inter_token_seconds")
        ]
        milliseconds = [figure(item.value * 1e3) if item else "" for item in extra]
        spread = f"{figure(min(record.samples))} .. {figure(max(record.samples))}"
        rows.append((name, figure(record.value), record.unit, spread, *milliseconds))
    return rows


WORKLOAD_HEADER = ("workload", "median", "unit", "min .. max", "TTFT ms", "inter-token ms")
BAR_HEADER = ("bar", "value", "required", "result")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m perf.bench_engine", description=__doc__)
    add_arguments(parser, rounds=3)
    parser.add_argument("--fail-below-bar", action="store_true", help="exit 4 if a bar is missed")
    parser.add_argument(
        "--update-docs", action="store_true", help="rewrite the table in docs/benchmarks.md"
    )
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    model = model_path(arguments.model)
    options = engine_options(arguments, model)
    workloads = select_workloads(arguments.workloads, quick=arguments.quick)
    try:
        bench = make_bench(arguments, model)
        records, info = measure_workloads(bench, options, workloads, arguments.rounds)
        records += bandwidth_records(bench, options, records, info)
        records += fresh_process_records(bench, options)
        if not arguments.allow_busy:
            bench.require_undisturbed()
    except MachineBusyError as error:
        complain(f"refused: {error}")
        return EXIT_BUSY
    except EngineFailure as error:
        complain(f"failed: {error}")
        return 1
    facts = run_info(arguments, "perf.bench_engine", model, bench, given)
    judged = bars(records)
    print(text_table(WORKLOAD_HEADER, workload_rows(records)))
    print()
    print(text_table(BAR_HEADER, [bar.row() for bar in judged]))
    print(f"\n{facts.footer()}")
    if arguments.json:
        write_json(arguments.json, records, facts)
    if arguments.update_docs:
        sections = [(WORKLOAD_HEADER, workload_rows(records))]
        sections.append((BAR_HEADER, [bar.row() for bar in judged]))
        update_section(ROOT / "docs" / "benchmarks.md", "bench_engine", sections, facts.footer())
    missed = arguments.fail_below_bar and not all(bar.passed for bar in judged)
    return EXIT_BELOW_BAR if missed else 0


if __name__ == "__main__":
    sys.exit(main())
