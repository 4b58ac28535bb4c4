"""Objectives, and whether the figures of a run meet them. No Locust."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objectives:
    """Seconds; a share of requests."""

    ttft_p95_seconds: float = 2.5
    inter_token_p99_seconds: float = 0.25
    failure_ratio: float = 0.01


DEFAULT = Objectives()


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run measured; None where nothing was."""

    requests: int
    failures: int
    ttft_p95_seconds: float | None
    inter_token_p99_seconds: float | None


def misses(figures: Figures, objectives: Objectives) -> list[str]:
    """A sentence per objective that was missed; an empty run misses all."""
    if figures.requests == 0:
        return ["no request was made"]
    found = []
    ratio = figures.failures / figures.requests
    if ratio > objectives.failure_ratio:
        found.append(f"{ratio:.2%} of requests failed; at most {objectives.failure_ratio:.2%} may")
    for name, value, limit in (
        ("95 % of first tokens", figures.ttft_p95_seconds, objectives.ttft_p95_seconds),
        ("99 % of further tokens", figures.inter_token_p99_seconds,
         objectives.inter_token_p99_seconds),
    ):  # fmt: skip
        if value is None:
            found.append(f"{name}: nothing was measured")
        elif value > limit:
            found.append(f"{name} came within {value:.3f} s; the objective is {limit:g} s")
    return found
