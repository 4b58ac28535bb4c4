"""The requests of a run, planned ahead: when each is sent, what it says, how much it wants."""

from __future__ import annotations

import random
from dataclasses import dataclass

from perf.locust.traffic import Lengths, text

LENGTHS = Lengths(prompt_max=512, output_max=128)


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. ``at``: seconds after the run's start, whatever became of those before it."""

    at: float
    prompt: str
    max_tokens: int


def poisson_trace(seed: int, round_index: int, rate: float, count: int) -> list[Planned]:
    """``count`` requests that arrive at ``rate`` a second, independently of each other (gaps are
    exponential), with log-normal lengths as in shared conversations.

    A function of its arguments: every server of a round gets the same requests. The first word
    names the round and the request, so that no prompt finds another's prefix in a cache.

    Raises:
        ValueError: the rate or the count is not positive.
    """
    if rate <= 0 or count <= 0:
        raise ValueError(f"rate {rate:g} and count {count} must be positive")
    draw = random.Random(f"{seed}-{round_index}-{rate:g}")
    at, planned = 0.0, []
    for index in range(count):
        at += draw.expovariate(rate)
        words, tokens = LENGTHS.draw(draw)
        name = f"{draw.getrandbits(32):08x}-{round_index}-{index}"
        planned.append(Planned(at, f"{name} {text(draw, words)}", tokens))
    return planned
