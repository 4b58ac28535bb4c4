"""From requests to figures, and the account that has to balance before anyone looks at them."""

from __future__ import annotations

import math
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from perf.analyzer.export import AnalyzedRequest
from perf.records import Record, figure

BENCH = "perf_analyzer"
_SERIES = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")


@dataclass(frozen=True, slots=True)
class Account:
    """Requests and tokens, as one side counted them."""

    finished: int
    """Ended with `stop` or `length`."""
    failed: int
    """Ended in another way."""
    refused: int
    """Never taken by the engine; a client sees them as failed."""
    prompt_tokens: int
    generated_tokens: int

    @property
    def ended(self) -> int:
        return self.finished + self.failed

    def __sub__(self, other: Account) -> Account:
        return Account(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


def account_of(requests: Sequence[AnalyzedRequest]) -> Account:
    """The client's side."""
    finished = [request for request in requests if request.finished]
    return Account(
        len(finished),
        len(requests) - len(finished),
        0,
        sum(request.prompt_tokens for request in requests),
        sum(request.tokens for request in requests),
    )


def server_account(metrics: str) -> Account:
    """The server's side, from the text of its metrics endpoint.

    Raises:
        ValueError: a series is missing; the message names it.
    """
    by_name: dict[str, list[tuple[str, int]]] = {}
    for line in metrics.splitlines():
        if match := _SERIES.fullmatch(line):
            entry = (match["labels"] or "", round(float(match["value"])))
            by_name.setdefault(match["name"], []).append(entry)

    def total(name: str, wanted: Callable[[str], bool] = lambda _labels: True) -> int:
        values = [value for labels, value in by_name.get(name, ()) if wanted(labels)]
        if not values:
            raise ValueError(f"the metrics endpoint has no {name}: is this a PocketLLM server?")
        return sum(values)

    ended = total("pocket_requests_total")
    finished = total("pocket_requests_total", lambda text: "stop" in text or "length" in text)
    return Account(
        finished,
        ended - finished,
        total("pocket_requests_refused_total"),
        total("pocket_tokens_total", lambda text: '"prompt"' in text),
        total("pocket_tokens_total", lambda text: '"generated"' in text),
    )


def scrape(url: str) -> Account:
    """The server's side now (its counters are up to a second old)."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        return server_account(answer.read().decode())


def differences(client: Account, server: Account, asked: int) -> list[str]:
    """A sentence for everything that does not agree exactly, or did not end well."""
    found = []
    if client.ended != asked:
        found.append(f"{client.ended} requests in the export, {asked} were asked for")
    bad = server.failed + server.refused
    if client.failed or bad:
        found.append(f"{client.failed} requests ended badly for the client, {bad} for the server")
    for entry, name in (
        ("finished", "finished requests"),
        ("prompt_tokens", "prompt tokens"),
        ("generated_tokens", "generated tokens"),
    ):
        here, there = getattr(client, entry), getattr(server, entry)
        if here != there:
            found.append(f"{name}: the client has {here}, the server counted {there}")
    if client.generated_tokens == 0:
        found.append("no token was generated")
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank, as perf_analyzer has it: a value that occurred.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def to_records(
    protocol: str, concurrency: int, requests: Sequence[AnalyzedRequest]
) -> list[Record]:
    """Figures of one level of concurrency; latencies have all values as samples."""
    first = [seconds for request in requests if (seconds := request.ttft) is not None]
    gaps = [gap for request in requests for gap in request.gaps]
    means = [mean for request in requests if (mean := request.per_output_token) is not None]
    whole = [request.ended - request.began for request in requests]
    wall = max(r.ended for r in requests) - min(r.began for r in requests)

    def record(metric: str, unit: str, value: float, samples: Sequence[float] = ()) -> Record:
        return Record(
            BENCH, "pocketllm", protocol, concurrency, metric, value, unit, tuple(samples)
        )

    found = [
        record("requests", "requests", len(requests)),
        record("generated_tokens", "tokens", sum(r.tokens for r in requests)),
        record("output_tokens_per_second", "tokens/s", sum(r.tokens for r in requests) / wall),
        record("requests_per_second", "1/s", len(requests) / wall),
    ]
    for name, values in (
        ("ttft_seconds", first),
        ("inter_token_seconds", gaps),
        ("time_per_output_token_seconds", means),
        ("request_seconds", whole),
    ):
        found += [
            record(
                f"{name}_{label}", "s", percentile(values, share), values if share == 0.5 else ()
            )
            for label, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
            if values
        ]
    return found


HEADER = (
    "protocol, concurrency",
    "requests",
    "tokens",
    "tokens/s",
    "requests/s",
    "TTFT p50 ms",
    "TTFT p95 ms",
    "inter-token p50 ms",
    "inter-token p99 ms",
    "per output token p50 ms",
    "request p50 ms",
    "request p95 ms",
)
_COLUMNS = (
    ("requests", 1.0),
    ("generated_tokens", 1.0),
    ("output_tokens_per_second", 1.0),
    ("requests_per_second", 1.0),
    ("ttft_seconds_p50", 1e3),
    ("ttft_seconds_p95", 1e3),
    ("inter_token_seconds_p50", 1e3),
    ("inter_token_seconds_p99", 1e3),
    ("time_per_output_token_seconds_p50", 1e3),
    ("request_seconds_p50", 1e3),
    ("request_seconds_p95", 1e3),
)


def table_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """One row per protocol and level, in the order of the records."""
    levels: dict[tuple[str, int], Mapping[str, float]] = {}
    for record in records:
        values = levels.setdefault((record.workload, record.concurrency), {})
        levels[record.workload, record.concurrency] = {**values, record.metric: record.value}
    return [
        (
            f"{protocol}, {concurrency}",
            *(
                figure(values[metric] * scale) if metric in values else "-"
                for metric, scale in _COLUMNS
            ),
        )
        for (protocol, concurrency), values in levels.items()
    ]
