"""``python -m perf.compare``: our engine and its peers, interleaved, on the same token prompts.

Every round runs every workload on every engine, one engine at a time while all others are stopped,
so that the slow drift of a machine touches all of them alike; the table has medians over the rounds
and ratios to the best peer of this run.  Peers are installed on first use
(``engines/environments.py``).

Exit status 3: the machine was busy; 4: below a bar, with ``--fail-below-bar``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from perf.bars import CACHE_BAR, OURS, OURS_UNCACHED, SPEEDUP_GOALS, Verdict, judge
from perf.engines.base import Engine, EngineFailure, EngineOptions
from perf.engines.environments import ROOT, prepare
from perf.engines.pocketllm import PocketLLMEngine
from perf.machine import MachineBusyError
from perf.measure import Bench, Sampled, to_records
from perf.records import Record, figure, find, text_table
from perf.report import update_section
from perf.run_options import (
    EXIT_BELOW_BAR,
    EXIT_BUSY,
    RunInfo,
    add_arguments,
    complain,
    engine_options,
    make_bench,
    model_path,
    run_info,
    uncached,
    write_json,
)
from perf.workloads import Point, Workload, select_workloads

BENCH = "compare"
PLOT = Path("assets") / "compare.png"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A started engine and what it takes part in."""

    name: str
    engine: Engine
    workloads: tuple[Workload, ...]


def start_all(
    peers: Sequence[str],
    options: EngineOptions,
    workloads: Sequence[Workload],
    bench: Bench,
    stack: ExitStack,
    kv_dtypes: Sequence[str] = (),
) -> list[Contestant]:
    """Start and warm up ours and every peer; a peer that fails is reported and left out.

    Ours takes part once more with each of ``kv_dtypes``, for orientation: the default one is
    judged.  ``stack`` closes what was started.

    Raises:
        EngineFailure: our own engine does not work.
    """
    shared = tuple(workload for workload in workloads if workload.family == "C")
    started: list[Contestant] = []
    first_tokens: list[tuple[int, ...]] = []

    def start(name: str, engine: Engine, chosen: Sequence[Workload], to: EngineOptions) -> None:
        stack.callback(engine.close)
        try:
            info = engine.start(to)
            bench.warm_up(engine, chosen)
            first_tokens.append(bench.first_tokens(engine))
            agreement = agreeing(name, first_tokens[-1], first_tokens[0])
        except EngineFailure:
            # Now, not at the end: what is left of it would run beside the others.
            engine.close()
            raise
        details = f"{info.get('version')}, weights: {info.get('weights')}, {agreement}"
        print(f"  {name}: {details}, loaded in {info.get('load_seconds', 0.0):.1f} s", flush=True)
        started.append(Contestant(name, engine, tuple(chosen)))

    start(OURS, PocketLLMEngine(OURS), workloads, options)
    if shared:
        start(OURS_UNCACHED, PocketLLMEngine(OURS_UNCACHED), shared, uncached(options))
    for kv_dtype in kv_dtypes:
        name = f"{OURS}, {kv_dtype} KV"
        extra = {**options.extra, "kv_cache_dtype": kv_dtype}
        start(name, PocketLLMEngine(name), workloads, replace(options, extra=extra))
    for peer in peers:
        try:
            for found in prepare(peer, Path(options.model), options.threads):
                settings = replace(options, model=str(found.model), extra=found.extra)
                start(found.engine.name, found.engine, workloads, settings)
        except EngineFailure as error:
            complain(f"  {peer}: left out: {error}")
    return started


def agreeing(name: str, theirs: Sequence[int], ours: Sequence[int]) -> str:
    """Says on how many prompts the two choose the same first token.

    Rounding decides near-ties (the random tokens in front of each prompt make many), and weights
    requantised to fewer levels agree on half; an engine that computes something else on none.

    Raises:
        EngineFailure: fewer than a quarter agree.
    """
    same = sum(a == b for a, b in zip(theirs, ours, strict=True))
    if 4 * same < len(ours):
        raise EngineFailure(f"{name}: only {same} of {len(ours)} first tokens are ours")
    return f"{same} of {len(ours)} first tokens as ours"


def run_rounds(
    bench: Bench, contestants: Sequence[Contestant], workloads: Sequence[Workload], rounds: int
) -> list[Record]:
    """Rounds x workloads x engines, in that order of nesting; who begins changes every round.

    An engine that fails in the middle is left out: half a sample set compares nothing.
    """
    samples: dict[str, list[Sampled]] = {contestant.name: [] for contestant in contestants}
    for round_index in range(rounds):
        for workload in workloads:
            for contestant in _rotated(contestants, round_index):
                if workload not in contestant.workloads or contestant.name not in samples:
                    continue
                try:
                    samples[contestant.name] += bench.sample(
                        contestant.engine, workload, round_index
                    )
                except EngineFailure as error:
                    if contestant.name == OURS:
                        raise
                    complain(f"  {contestant.name}: left out: {error}")
                    del samples[contestant.name]
        print(f"  round {round_index + 1} of {rounds} done", flush=True)
    return [record for name in samples for record in to_records(BENCH, name, samples[name])]


def _rotated(contestants: Sequence[Contestant], by: int) -> Iterator[Contestant]:
    shift = by % len(contestants)
    yield from contestants[shift:]
    yield from contestants[:shift]


def verdicts(records: Sequence[Record], workloads: Sequence[Workload]) -> list[Verdict]:
    """One per row of the table, in the workloads' order."""
    return [judge(point, records) for workload in workloads for point in workload.points]


def table(
    judged: Sequence[Verdict], records: Sequence[Record]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows: ours, each peer, the ratio to the best peer, the bar and the result."""
    names = list(dict.fromkeys(r.engine for r in records if r.engine not in (OURS, OURS_UNCACHED)))
    header = ("workload", OURS, *names, "best peer", "ratio", "bar", "result")
    rows = [
        (
            _title(verdict.point),
            figure(verdict.values.get(OURS)),
            *(figure(verdict.values.get(name)) for name in names),
            verdict.best_peer or "-",
            "-" if verdict.ratio is None else f"{verdict.ratio:.2f}x",
            _bar_text(verdict),
            verdict.mark,
        )
        for verdict in judged
    ]
    return header, rows


def _title(point: Point) -> str:
    return f"{point.workload}, {point.unit}"


def _bar_text(verdict: Verdict) -> str:
    if verdict.bar is None:
        return "-"
    goal = SPEEDUP_GOALS.get(verdict.point.workload)
    return f"{verdict.bar:.1f}x" + (f" (goal {goal:.0f}x)" if goal else "")


def cache_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """What the prefix cache is worth to us: C against the same engine without it."""
    rows = []
    for workload in ("C cold", "C warm"):
        cached = find(records, engine=OURS, workload=workload)
        plain = find(records, engine=OURS_UNCACHED, workload=workload)
        if cached and plain:
            ratio = plain.value / cached.value
            result = "pass" if ratio >= CACHE_BAR else "FAIL"
            rows.append(
                (
                    f"{workload}, s",
                    figure(cached.value),
                    figure(plain.value),
                    f"{ratio:.1f}x",
                    f"{CACHE_BAR:.0f}x",
                    result,
                )
            )
    return rows


CACHE_HEADER = ("workload", OURS, OURS_UNCACHED, "ratio", "bar", "result")


def latency_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Median time to first token and per token after it, in ms, where an engine tells them."""
    rows = []
    for record in records:
        if record.metric != "ttft_seconds":
            continue
        gap = find(
            records, engine=record.engine, workload=record.workload, metric="inter_token_seconds"
        )
        rows.append(
            (
                f"{record.engine}, {record.workload}",
                figure(record.value * 1e3),
                figure(gap.value * 1e3 if gap else None),
            )
        )
    return rows


LATENCY_HEADER = ("engine, workload", "TTFT ms", "inter-token ms")


def publish(
    records: Sequence[Record], judged: Sequence[Verdict], info: RunInfo, docs: Path
) -> None:
    """Rewrite the comparison in ``docs/benchmarks.md`` with its plot."""
    from perf.plot import plot_comparison

    caption = f"{info.model}, {info.threads} threads, medians of {info.rounds} interleaved rounds. "
    caption += f"{info.machine.cpu}, {info.date}, commit {info.machine.commit}"
    plot_comparison(docs / PLOT, records, caption)
    update_section(
        docs / "benchmarks.md",
        "compare",
        [
            table(judged, records),
            (CACHE_HEADER, cache_rows(records)),
            (LATENCY_HEADER, latency_rows(records)),
        ],
        info.footer(),
        (PLOT.as_posix(), "Decode, prefill and shared-prefix figures of all engines in one run"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m perf.compare", description=__doc__)
    add_arguments(parser, rounds=3)
    parser.add_argument(
        "--peers",
        default="openvino,vllm,llama.cpp,transformers",
        help="comma list (default: all four)",
    )
    parser.add_argument(
        "--kv-dtypes", default="", help="comma list: ours also with these, besides the default"
    )
    parser.add_argument("--fail-below-bar", action="store_true", help="exit 4 if a bar is missed")
    parser.add_argument(
        "--update-docs", action="store_true", help="rewrite table and plot in docs/"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    model = model_path(arguments.model)
    options = engine_options(arguments, model)
    workloads = select_workloads(arguments.workloads, quick=arguments.quick)
    peers = [name.strip() for name in arguments.peers.split(",") if name.strip()]
    kv_dtypes = [name.strip() for name in arguments.kv_dtypes.split(",") if name.strip()]
    try:
        with ExitStack() as stack:
            bench = make_bench(arguments, model)
            contestants = start_all(peers, options, workloads, bench, stack, kv_dtypes)
            records = run_rounds(bench, contestants, workloads, arguments.rounds)
        if arguments.json:
            # Also of a run that will be refused below: its file says so, and shows what happened.
            info = run_info(arguments, "perf.compare", model, bench, given)
            write_json(arguments.json, records, info)
        if not arguments.allow_busy:
            bench.require_undisturbed()
    except MachineBusyError as error:
        complain(f"refused: {error}")
        return EXIT_BUSY
    except EngineFailure as error:
        complain(f"failed: {error}")
        return 1
    info = run_info(arguments, "perf.compare", model, bench, given)
    judged = verdicts(records, workloads)
    print(text_table(*table(judged, records)))
    if cache_rows(records):
        print("\n" + text_table(CACHE_HEADER, cache_rows(records)))
    print(f"\n{info.footer()}")
    if arguments.update_docs:
        publish(records, judged, info, arguments.docs)
    missed = any(verdict.passed is False for verdict in judged)
    return EXIT_BELOW_BAR if missed and arguments.fail_below_bar else 0


if __name__ == "__main__":
    sys.exit(main())
