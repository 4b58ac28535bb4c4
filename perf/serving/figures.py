"""What a ledger says: goodput under objectives, percentiles, tokens per CPU-second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from perf.records import Record, figure, find
from perf.serving.client import Finished

BENCH = "serve_bench"


@dataclass(frozen=True, slots=True)
class Objectives:
    """A request is good if it ended well, its first token came within ``ttft`` seconds of its
    planned arrival, and the others within ``per_token`` seconds each on average."""

    ttft: float = 1.0
    per_token: float = 0.1

    def met(self, request: Finished) -> bool:
        return (
            not request.error
            and request.ttft <= self.ttft
            and request.per_output_token <= self.per_token
        )

    def __str__(self) -> str:
        return f"first token within {self.ttft:g} s, others {self.per_token * 1e3:g} ms on average"


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn of one server."""

    ledger: tuple[Finished, ...]
    cpu_seconds: float
    """Of the server's processes."""


def figures_of(turn: TurnResult, objectives: Objectives) -> dict[tuple[str, str], float]:
    """(metric, unit) to value; latencies of requests that ended well only.

    Raises:
        ValueError: an empty ledger.
    """
    ledger = turn.ledger
    if not ledger:
        raise ValueError("an empty ledger has no figures")
    # From the trace's start to the last end: a server that falls behind has a longer run.
    seconds = max(request.ended for request in ledger)
    done = [request for request in ledger if not request.error]
    tokens = sum(request.tokens for request in done)
    good = sum(objectives.met(request) for request in ledger)
    values = {
        ("goodput_requests_per_second", "1/s"): good / seconds,
        ("good_ratio", "of requests"): good / len(ledger),
        ("failed_requests", "requests"): float(len(ledger) - len(done)),
        ("output_tokens_per_second", "tokens/s"): tokens / seconds,
        ("output_tokens_per_cpu_second", "tokens/s"): tokens / max(turn.cpu_seconds, 1e-9),
    }
    for name, found in (
        ("ttft_seconds", [request.ttft for request in done]),
        ("per_output_token_seconds", [r.per_output_token for r in done if r.tokens > 1]),
        ("inter_token_seconds", [gap for request in done for gap in gaps(request)]),
        ("request_seconds", [request.seconds for request in done]),
    ):
        for share in (50, 95, 99) if found else ():
            values[f"{name}_p{share}", "s"] = percentile(found, share / 100)
    return values


def gaps(request: Finished) -> list[float]:
    """Seconds between pieces of text."""
    times = request.arrivals
    return [later - earlier for earlier, later in pairwise(times)]


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: a value that occurred."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def most_at_once(ledger: Sequence[Finished]) -> int:
    """The largest number of requests that were open at the same time."""
    changes = sorted(
        [(request.sent, 1) for request in ledger] + [(request.ended, -1) for request in ledger]
    )
    open_now = most = 0
    for _, change in changes:
        open_now += change
        most = max(most, open_now)
    return most


def workload(rate: float) -> str:
    return f"trace {rate:g}/s"


def to_records(
    turns: Mapping[tuple[str, float], Sequence[TurnResult]], objectives: Objectives
) -> list[Record]:
    """One record per server, rate and metric: the median of the rounds, which are the samples."""
    records = []
    for (engine, rate), results in turns.items():
        samples: dict[tuple[str, str], list[float]] = {}
        for result in results:
            for key, value in figures_of(result, objectives).items():
                samples.setdefault(key, []).append(value)
        at_once = max(most_at_once(result.ledger) for result in results)
        records += [
            Record.of(BENCH, engine, workload(rate), at_once, metric, unit, values)
            for (metric, unit), values in samples.items()
        ]
    return records


def errors_of(turns: Mapping[tuple[str, float], Sequence[TurnResult]]) -> list[str]:
    """A line per server and kind of failure, most frequent first."""
    found = Counter(
        f"{engine}: {request.error}"
        for (engine, _), results in turns.items()
        for result in results
        for request in result.ledger
        if request.error
    )
    return [f"{count} x {what}" for what, count in found.most_common()]


HEADER = (
    "server, rate",
    "goodput 1/s",
    "good",
    "failed",
    "tokens/s",
    "tokens per CPU s",
    "TTFT p50 ms",
    "TTFT p95 ms",
    "per token p50 ms",
    "inter-token p99 ms",
    "request p50 ms",
    "request p95 ms",
)
_COLUMNS = (
    ("goodput_requests_per_second", 1.0),
    ("good_ratio", 100.0),
    ("failed_requests", 1.0),
    ("output_tokens_per_second", 1.0),
    ("output_tokens_per_cpu_second", 1.0),
    ("ttft_seconds_p50", 1e3),
    ("ttft_seconds_p95", 1e3),
    ("per_output_token_seconds_p50", 1e3),
    ("inter_token_seconds_p99", 1e3),
    ("request_seconds_p50", 1e3),
    ("request_seconds_p95", 1e3),
)


def table_rows(records: Sequence[Record], rates: Sequence[float]) -> list[tuple[str, ...]]:
    """One row per rate and server, the servers of a rate together."""
    engines = list(dict.fromkeys(record.engine for record in records))
    rows = []
    for rate in rates:
        for engine in engines:
            cells = []
            for metric, scale in _COLUMNS:
                record = find(records, engine=engine, workload=workload(rate), metric=metric)
                cell = figure(record.value * scale if record else None)
                cells.append(f"{cell} %" if metric == "good_ratio" else cell)
            rows.append((f"{engine}, {rate:g}/s", *cells))
    return rows
