"""Figures of one variant (a policy with its settings) over all servers that replayed it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perf.records import Record, figure, text_table
from perf.simulation.replay import Outcome

BENCH = "simulate"
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Objective:
    """The service level that counts for goodput: both must be kept (seconds)."""

    ttft: float = 2.0
    per_token: float = 0.1
    """Mean time between the tokens of the request."""


@dataclass(frozen=True, slots=True)
class Summary:
    """See the module. Sorted arrays are kept for the plot."""

    variant: str
    requests: int
    """Finished ones."""
    refused: int
    failed: int
    ttft: np.ndarray
    """Seconds from arrival to the first token; sorted."""
    ttft_by_kind: dict[str, np.ndarray]
    gap_seconds: np.ndarray
    """Distinct times between tokens, sorted, and how often each occurred."""
    gap_counts: np.ndarray
    good: int
    """Requests that kept the objective."""
    seconds: float
    """Virtual time of all servers together."""
    busy_seconds: float
    preemptions: int
    recomputed_tokens: int
    computed_tokens: int
    output_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    steps: int

    @property
    def goodput(self) -> float:
        """Requests that kept the objective, per second and server."""
        return self.good / self.seconds if self.seconds else 0.0

    @property
    def good_share(self) -> float:
        """Part of all requests sent (refused and failed ones count against it)."""
        return self.good / max(1, self.requests + self.refused + self.failed)

    @property
    def hit_rate(self) -> float:
        return self.prefix_hit_tokens / max(1, self.prefix_query_tokens)

    @property
    def recomputed_share(self) -> float:
        return self.recomputed_tokens / max(1, self.computed_tokens)

    @property
    def utilisation(self) -> float:
        return self.busy_seconds / self.seconds if self.seconds else 0.0

    def ttft_at(self, q: float, kind: str | None = None) -> float:
        return quantile(self.ttft if kind is None else self.ttft_by_kind[kind], q)

    def gap_at(self, q: float) -> float:
        return weighted_quantile(self.gap_seconds, self.gap_counts, q)


def summarise(
    variant: str,
    outcomes: Sequence[Outcome],
    kinds: Sequence[Sequence[str]],
    objective: Objective,
) -> Summary:
    """``kinds``: the kind of every request of each server's trace, in the trace's order."""
    ttft = np.concatenate([o.first_token - o.arrival for o in outcomes])
    output = np.concatenate([o.output_tokens for o in outcomes])
    span = np.concatenate([o.finish - o.first_token for o in outcomes])
    per_token = span / np.maximum(1, output - 1)
    labels = np.array([names[i] for names, o in zip(kinds, outcomes, strict=True) for i in o.index])
    gaps = np.concatenate([o.gap_seconds for o in outcomes])
    counts = np.concatenate([o.gap_counts for o in outcomes])
    order = np.argsort(gaps, kind="stable")
    return Summary(
        variant=variant,
        requests=len(ttft),
        refused=sum(o.refused for o in outcomes),
        failed=sum(o.failed for o in outcomes),
        ttft=np.sort(ttft),
        ttft_by_kind={str(k): np.sort(ttft[labels == k]) for k in np.unique(labels)},
        gap_seconds=gaps[order],
        gap_counts=counts[order],
        good=int(np.sum((ttft <= objective.ttft) & (per_token <= objective.per_token))),
        seconds=sum(o.seconds for o in outcomes),
        busy_seconds=sum(o.busy_seconds for o in outcomes),
        preemptions=sum(o.preemptions for o in outcomes),
        recomputed_tokens=sum(o.recomputed_tokens for o in outcomes),
        computed_tokens=sum(o.computed_tokens for o in outcomes),
        output_tokens=int(output.sum()),
        prefix_query_tokens=sum(o.prefix_query_tokens for o in outcomes),
        prefix_hit_tokens=sum(o.prefix_hit_tokens for o in outcomes),
        steps=sum(o.steps for o in outcomes),
    )


def quantile(ordered: np.ndarray, q: float) -> float:
    """The smallest value that at least ``q`` of the values do not exceed; nan of nothing."""
    if not len(ordered):
        return float("nan")
    return float(ordered[max(0, int(np.ceil(q * len(ordered))) - 1)])


def weighted_quantile(ordered: np.ndarray, counts: np.ndarray, q: float) -> float:
    """``quantile`` of ``ordered[i]`` repeated ``counts[i]`` times."""
    if not len(ordered):
        return float("nan")
    ends = np.cumsum(counts)
    place = int(np.searchsorted(ends, max(1, int(np.ceil(q * ends[-1])))))
    return float(ordered[place])


def records(summary: Summary, servers: int) -> list[Record]:
    """``workload`` is the variant, ``concurrency`` the number of simulated servers."""
    values: list[tuple[str, float, str]] = []
    for q in QUANTILES:
        values.append((f"ttft_seconds_p{q * 100:g}", summary.ttft_at(q), "s"))
        for kind in summary.ttft_by_kind:
            if kind:
                name = f"ttft_seconds_{kind}_p{q * 100:g}"
                values.append((name, summary.ttft_at(q, kind), "s"))
    values += [
        *((f"inter_token_seconds_p{q * 100:g}", summary.gap_at(q), "s") for q in QUANTILES),
        ("goodput_requests_per_second", summary.goodput, "1/s"),
        ("good_ratio", summary.good_share, ""),
        ("utilisation_ratio", summary.utilisation, ""),
        ("prefix_hit_ratio", summary.hit_rate, ""),
        ("recomputed_ratio", summary.recomputed_share, ""),
        ("preemptions_total", summary.preemptions, ""),
        ("requests_total", summary.requests, ""),
        ("refused_total", summary.refused, ""),
        ("failed_total", summary.failed, ""),
        ("output_tokens_per_step", summary.output_tokens / max(1, summary.steps), ""),
    ]
    return [
        Record(BENCH, "pocketllm", summary.variant, servers, metric, float(value), unit)
        for metric, value, unit in values
        if not math.isnan(value)  # JSON has none
    ]


_HEADER = (
    "variant",
    "TTFT p50",
    "p90",
    "p99 s",
    "ITL p50",
    "p99 ms",
    "goodput/s",
    "in SLO",
    "preempt.",
    "recomp.",
    "hits",
    "busy",
    "refused",
)


def table(summaries: Sequence[Summary]) -> str:
    """One line per variant, and below it the TTFT of every kind of request."""
    rows = [
        (
            s.variant,
            *(figure(s.ttft_at(q)) for q in QUANTILES),
            figure(s.gap_at(0.5) * 1e3),
            figure(s.gap_at(0.99) * 1e3),
            figure(s.goodput),
            f"{s.good_share:.1%}",
            f"{s.preemptions:,}",
            f"{s.recomputed_share:.1%}",
            f"{s.hit_rate:.1%}",
            f"{s.utilisation:.1%}",
            str(s.refused + s.failed),
        )
        for s in summaries
    ]
    text = text_table(_HEADER, rows)
    kinds = sorted({kind for s in summaries for kind in s.ttft_by_kind if kind})
    if kinds:
        header = ("TTFT p50 / p99 s", *kinds)
        cells = [
            (
                s.variant,
                *(
                    f"{figure(s.ttft_at(0.5, kind))} / {figure(s.ttft_at(0.99, kind))}"
                    if kind in s.ttft_by_kind
                    else "-"
                    for kind in kinds
                ),
            )
            for s in summaries
        ]
        text += "\n\n" + text_table(header, cells)
    return text
