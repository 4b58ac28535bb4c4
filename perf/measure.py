"""Runs workloads on engines: warm-up, busy check, repeats, and the samples that become records."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from perf.engines.base import BatchResult, Engine
from perf.engines.subprocess_engine import SubprocessEngine
from perf.machine import BusyMonitor, Machine, MachineBusyError, describe_machine
from perf.records import Record
from perf.workloads import Batch, Corpus, Point, Workload, decode_workload, figure_of

WARM_UP_NEW_TOKENS = 4
WARM_UP_ROUND = -1
CHECK_ROUND = -2
CHECKED_PROMPTS = 16
SETTLE_SECONDS = 0.2
"""Threads of the engine that ran before may still spin for a while before they park."""
RETRY_ROUND_STEP = 1000
"""A repeated measurement gets prompts of its own: the first try has filled the prefix cache."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One measured figure of one round."""

    point: Point
    concurrency: int
    values: Mapping[tuple[str, str], float]
    """(metric, unit) to value: the point's own figure first, then latencies where known."""
    quiet: bool


@dataclass(slots=True)
class Bench:
    """What all measurements of a run share.

    ``retries``: how often a measurement is repeated that other processes disturbed.
    """

    corpus: Corpus
    seed: int
    monitor: BusyMonitor
    retries: int = 3
    machine: Machine = field(default_factory=describe_machine)
    """Read when the run begins: others may commit while it goes on."""
    settle: Callable[[float], None] = time.sleep
    disturbed: list[str] = field(default_factory=list)
    """Figures that stayed disturbed after all retries."""

    def warm_up(self, engine: Engine, workloads: Sequence[Workload]) -> None:
        """Run every shape once with few new tokens: engines compile and allocate on first use."""
        for workload in workloads:
            for batch in workload.batches(self.corpus, self.seed, WARM_UP_ROUND):
                engine.run(batch.prompts, min(batch.max_new_tokens, WARM_UP_NEW_TOKENS))
        self.rest(engine)

    def first_tokens(self, engine: Engine) -> tuple[int, ...]:
        """The token that ``engine`` puts after each prompt of A16: do all compute the same?"""
        (batch,) = decode_workload(CHECKED_PROMPTS).batches(self.corpus, self.seed, CHECK_ROUND)
        result = engine.run(batch.prompts, 1)
        self.rest(engine)
        return tuple(request.token_ids[0] for request in result.requests)

    def sample(self, engine: Engine, workload: Workload, round_index: int) -> list[Sampled]:
        """Run one round of ``workload``; a disturbed one is repeated, the last try is kept."""
        for attempt in range(self.retries + 1):
            prompts = workload.batches(
                self.corpus, self.seed, round_index + attempt * RETRY_ROUND_STEP
            )
            self.settle(SETTLE_SECONDS)
            samples = [
                self._run(engine, workload, point, batch)
                for point, batch in zip(workload.points, prompts, strict=True)
            ]
            self.rest(engine)
            if all(sampled.quiet for sampled in samples):
                break
        else:
            self.disturbed += [
                f"{engine.name} {sampled.point.workload} round {round_index}"
                for sampled in samples
                if not sampled.quiet
            ]
        return samples

    def _run(self, engine: Engine, workload: Workload, point: Point, batch: Batch) -> Sampled:
        # A peer's own tree is the measured work, and this process is foreign to it: a thread of
        # ours that spins while the peer runs must show.
        pid = engine.pid if isinstance(engine, SubprocessEngine) else os.getpid()
        if isinstance(engine, SubprocessEngine):
            engine.resume()
        with self.monitor.measuring(pid):
            result = engine.run(batch.prompts, batch.max_new_tokens)
        value = figure_of(point, batch, result.wall_seconds, result.generated_tokens)
        values = {(point.metric, point.unit): value}
        if workload.family == "A":
            values |= latencies(result)
        values |= {
            (f"{process}_cpu_seconds", "s"): seconds
            for process, seconds in result.cpu_seconds.items()
        }
        return Sampled(point, workload.concurrency, values, self.monitor.last_was_quiet())

    def rest(self, engine: Engine) -> None:
        """Keep a peer from using the CPU until its next turn."""
        if isinstance(engine, SubprocessEngine):
            engine.pause()

    def require_undisturbed(self) -> None:
        """Raises: MachineBusyError naming what was disturbed in spite of all retries."""
        if self.disturbed:
            listed = ", ".join(self.disturbed[:5])
            raise MachineBusyError(
                f"other processes used more than {self.monitor.limit:.0%} of the CPU during "
                f"{len(self.disturbed)} measurement(s) ({listed}), after {self.retries} retries: "
                "run on an idle machine, or pass --allow-busy for figures that are not for "
                "publication"
            )


def latencies(result: BatchResult) -> dict[tuple[str, str], float]:
    """Medians over the requests of time to first token and of time per token after it."""
    first = [r.first_token_seconds for r in result.requests]
    known = [value for value in first if value is not None]
    if len(known) < len(first):
        return {}
    gaps = [
        (request.finished_seconds - start) / (len(request.token_ids) - 1)
        for request, start in zip(result.requests, known, strict=True)
        if len(request.token_ids) > 1
    ]
    values = {("ttft_seconds", "s"): statistics.median(known)}
    if gaps:
        values["inter_token_seconds", "s"] = statistics.median(gaps)
    return values


def to_records(bench: str, engine: str, samples: Sequence[Sampled]) -> list[Record]:
    """One record per workload and metric, with the samples of all rounds in order."""
    grouped: dict[tuple[str, int, str, str], list[float]] = {}
    for sampled in samples:
        for (metric, unit), value in sampled.values.items():
            key = (sampled.point.workload, sampled.concurrency, metric, unit)
            grouped.setdefault(key, []).append(value)
    return [
        Record.of(bench, engine, workload, concurrency, metric, unit, values)
        for (workload, concurrency, metric, unit), values in grouped.items()
    ]
