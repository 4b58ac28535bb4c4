"""``python -m perf.simulate``: request traces through the real scheduler in virtual time.

Every variant (a policy, and each combination of ``--set`` values) replays the same trace on the
same simulated servers. A step takes what the cost model says; its default was fitted to our engine
with ``--fit``. Results depend on the arguments only, not on the machine or the number of processes.

    python -m perf.simulate                                     # 100,000 requests per policy
    python -m perf.simulate --policy priority --set reserved_share=0,0.25,0.5 --requests 20000
    python -m perf.simulate --trace trace.jsonl --policy fcfs,lpm --json out.json --plot out.png
    python -m perf.simulate --fit --model model.gguf            # measure the cost model here

The trace file's format: ``perf/simulation/trace.py``. Synthetic distributions: ``synthetic.py``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from perf.machine import describe_machine
from perf.records import Record, write_records
from perf.simulation.cost import CostModel
from perf.simulation.replay import Outcome, Replay, Server
from perf.simulation.summary import Objective, records, summarise, table
from perf.simulation.synthetic import MIXES, Workload, generate
from perf.simulation.trace import TraceRequest, deal, read_trace, write_trace
from pocket_backend.api import ConfigurationError
from pocket_backend.core import SchedulerConfig

DEFAULT_COST = "3014,377.5,565.5,0.5203"
"""Microseconds. From ``--fit`` with SmolLM2-135M Q4_1 on 2 threads of an AMD EPYC (family 25, model
17), best of 9 rounds while other work kept the cores busy; median error of a step 13 %."""
DEFAULT_RATE = 1.2
"""Keeps a server of the default cost busy nine tenths of the time."""
_COLLECT_EVERY = 200_000
"""Allocations between two garbage collections: almost nothing here is cyclic."""


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    config: SchedulerConfig


@dataclass(frozen=True, slots=True)
class Source:
    """Where a server's trace comes from; small, so that processes make traces themselves."""

    path: Path | None
    workload: Workload
    requests: int
    servers: int
    seed: int

    def trace(self, server: int) -> list[TraceRequest]:
        if self.path is not None:
            return deal(read_trace(self.path), self.servers)[server]
        count = self.requests // self.servers + (server < self.requests % self.servers)
        return generate(self.workload, count, self.seed, server)


def main(arguments: list[str] | None = None) -> int:
    argv = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_args(argv)
    if options.fit:
        return _fit(options)
    try:
        cost = CostModel.parse(options.cost)
        chosen = variants(options.policy, options.set)
        source = Source(
            options.trace,
            Workload(options.rate, max_tokens=min(8192, options.context), mix=options.workload),
            options.requests,
            options.servers or (1 if options.trace else min(8, options.requests)),
            options.seed,
        )
        server = Server(
            cost, options.slots, options.kv_tokens, options.budget, max_context=options.context
        )
        if options.write_trace is not None:
            traces = [source.trace(i) for i in range(source.servers)]
            write_trace(options.write_trace, itertools.chain.from_iterable(traces))
        kinds = [[r.kind for r in source.trace(i)] for i in range(source.servers)]
    except (ValueError, OSError, ConfigurationError) as error:
        parser.error(str(error))
    objective = Objective(options.slo_ttft, options.slo_per_token)
    began, used = time.perf_counter(), sum(os.times()[:4])
    outcomes = run(source, server, chosen, options.processes)
    seconds, used = time.perf_counter() - began, sum(os.times()[:4]) - used
    summaries = [
        summarise(variant.name, results, kinds, objective)
        for variant, results in zip(chosen, outcomes, strict=True)
    ]
    print(table(summaries))
    total = sum(len(k) for k in kinds)
    what = (
        options.trace.name if options.trace else f"{options.workload}, {options.rate:g} requests/s"
    )
    footer = (
        f"{total:,} requests per variant ({what}, seed {options.seed}) on {source.servers} "
        f"simulated servers of {server.slots} slots, {server.kv_tokens:,} KV tokens, "
        f"budget {server.budget}; cost {cost} us; SLO: TTFT {objective.ttft:g} s, "
        f"{objective.per_token:g} s per token"
    )
    print(
        f"\n{footer}\n{describe_machine().summary()}\n{seconds:.1f} s ({used:.1f} s of CPU) for "
        f"{total * len(chosen):,} requests, {sum(s.output_tokens for s in summaries):,} tokens and "
        f"{sum(s.steps for s in summaries):,} steps in {options.processes} processes"
    )
    if options.json is not None:
        made: list[Record] = []
        for summary in summaries:
            made += records(summary, source.servers)
        write_records(options.json, made)
    if options.plot is not None:
        from perf.simulation.picture import plot

        command = " ".join(["python -m perf.simulate", *argv])
        plot(options.plot, summaries, objective, f"{footer}\n{command}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--requests", type=_positive, default=100_000, help="of the synthetic trace, per variant")
    add("--workload", default="mixed", choices=MIXES, help="kind of the synthetic trace")
    add("--rate", type=float, default=DEFAULT_RATE, help="requests per second of one server")
    add("--servers", type=_positive, help="independent servers (8; 1 for a trace file)")
    add("--policy", default="fcfs,priority,lpm", help="comma list")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=V,V",
        help="a field of SchedulerConfig and the values to compare; may be repeated",
    )
    add("--trace", type=Path, metavar="FILE", help="replay this JSON-lines trace instead")
    add("--write-trace", type=Path, metavar="FILE", help="also write the trace that is replayed")
    add("--seed", type=int, default=0)
    add("--slots", type=_positive, default=16, help="sequences that a server runs at once")
    add("--kv-tokens", type=_positive, default=32768, help="capacity of a server's KV pool")
    add("--budget", type=_positive, default=512, help="tokens per step")
    add("--context", type=_positive, default=8192, help="tokens per sequence")
    add("--cost", default=DEFAULT_COST, help="microseconds: base,prefill,decode,attended")
    add("--slo-ttft", type=float, default=Objective().ttft, help="seconds")
    add("--slo-per-token", type=float, default=Objective().per_token, help="seconds")
    add("--processes", type=_positive, default=len(os.sched_getaffinity(0)))
    add("--json", type=Path, metavar="FILE", help="write the records there")
    add("--plot", type=Path, metavar="FILE", help="write a picture there")
    add("--fit", action="store_true", help="measure steps of the real engine, print a --cost")
    add("--model", help="with --fit: a GGUF file; default: the demo model's package")
    add("--rounds", type=_positive, default=9, help="with --fit: each shape's best of so many")
    add("--threads", type=_positive, default=2, help="with --fit")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def variants(policies: str, settings: Sequence[str]) -> list[Variant]:
    """All combinations of policies and settings.

    Raises:
        ValueError: an unknown or repeated name, or a value that SchedulerConfig refuses.
    """
    known = {field.name for field in fields(SchedulerConfig)}
    axes: list[list[tuple[str, object]]] = []
    for setting in settings:
        name, sign, values = setting.partition("=")
        if not sign or name not in known or name == "policy" or name in {a[0][0] for a in axes}:
            raise ValueError(f"--set {setting}: give NAME=VALUE,... of SchedulerConfig, each once")
        axes.append([(name, _value(text)) for text in values.split(",")])
    made = []
    for policy in policies.split(","):
        for combination in itertools.product(*axes):
            label = " ".join([policy, *(f"{name}={value}" for name, value in combination)])
            made.append(
                Variant(label, SchedulerConfig(policy=policy, **dict(combination)))  # type: ignore[arg-type]
            )
    return made


def _value(text: str) -> object:
    words: dict[str, object] = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def run(
    source: Source, server: Server, chosen: Sequence[Variant], processes: int
) -> list[list[Outcome]]:
    """The outcomes of every variant, one per server. Each process replays whole servers."""
    jobs = [(source, server, v.config, i) for v in chosen for i in range(source.servers)]
    if processes == 1 or len(jobs) == 1:
        results: Iterator[Outcome] = map(_replay, jobs)
        return _by_variant(results, len(chosen), source.servers)
    with ProcessPoolExecutor(min(processes, len(jobs))) as pool:
        return _by_variant(pool.map(_replay, jobs), len(chosen), source.servers)


def _by_variant(results: Iterator[Outcome], count: int, servers: int) -> list[list[Outcome]]:
    return [list(itertools.islice(results, servers)) for _ in range(count)]


def _replay(job: tuple[Source, Server, SchedulerConfig, int]) -> Outcome:
    source, server, config, index = job
    trace = source.trace(index)
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(_COLLECT_EVERY, *thresholds[1:])
    try:
        return Replay(trace, server, config).run()
    finally:
        gc.set_threshold(*thresholds)


def _fit(options: argparse.Namespace) -> int:
    from perf.run_options import model_path
    from perf.simulation.fit import measure

    model = model_path(options.model)
    found = measure(str(model), options.threads, options.rounds)
    print(
        f"--cost {found.model}\nmicroseconds: base, per prefill token, per decode token, per "
        f"attended position. {model.name}, {options.threads} threads, {found.samples} shapes; "
        f"error of the prediction: median {found.median_error:.1%}, worst {found.worst_error:.1%}\n"
        f"{describe_machine().summary()}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
