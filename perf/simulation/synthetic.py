"""Traces from stated distributions.

Lengths are log-normal, as measured traces of chat services are. The default means, 217 prompt and
200 output tokens, are those of the ShareGPT sample that serving benchmarks commonly draw. Sessions
start as a Poisson process, the number of turns is geometric, the time between an answer and the
next turn exponential.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from perf.simulation.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of a length, cut at ``high``.

    ``mean`` is that of the distribution before it is cut and rounded; ``sigma`` is the standard
    deviation of the logarithm.
    """

    mean: float
    sigma: float
    high: int
    low: int = 1

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """``count`` lengths, int64."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        values = random.lognormal(mu, self.sigma, count)
        return np.clip(np.rint(values), self.low, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of request. ``share`` is its part of the *sessions* (a single request is one)."""

    name: str
    share: float
    prompt: Lengths
    output: Lengths
    priority: int = 0
    prefixes: int = 0
    """How many different shared prefixes (system prompts) there are; sessions choose one."""
    prefix_tokens: int = 0
    mean_turns: float = 1.0
    mean_think_seconds: float = 0.0


PROMPT = Lengths(mean=217, sigma=1.1, high=2048, low=4)
OUTPUT = Lengths(mean=200, sigma=0.9, high=1024)
DEFAULT_KINDS = (
    Kind(
        "chat",
        share=0.40,
        prompt=Lengths(mean=100, sigma=1.0, high=1024, low=4),
        output=OUTPUT,
        prefixes=8,
        prefix_tokens=384,
        mean_turns=3.0,
        mean_think_seconds=15.0,
    ),
    Kind("single", share=0.38, prompt=PROMPT, output=OUTPUT),
    Kind("batch", share=0.15, prompt=PROMPT, output=OUTPUT, priority=4),
    Kind(
        "long",
        share=0.07,
        prompt=Lengths(mean=3500, sigma=0.4, high=6000, low=1024),
        output=Lengths(mean=120, sigma=0.7, high=512),
    ),
)

BURST_SIZE = 16
BURST_PREFIX_TOKENS = 1024
BURST_OWN_TOKENS = 32
BURST_OUTPUT = Lengths(mean=32, sigma=0.5, high=128)
MIXES = ("mixed", "bursts")


@dataclass(frozen=True, slots=True)
class Workload:
    """``mix``: ``mixed`` is the kinds; ``bursts`` are 16 requests at once that share a prefix which
    nobody sent before (workload C of the benchmarks), bursts arriving as a Poisson process.

    ``rate``: requests (all turns) per second of one server. ``max_tokens``: a session ends
    before a turn whose prompt and output would be longer, and single requests are cut to it."""

    rate: float
    kinds: tuple[Kind, ...] = field(default=DEFAULT_KINDS)
    max_tokens: int = 8192
    mix: str = "mixed"


def generate(workload: Workload, requests: int, seed: int, server: int = 0) -> list[TraceRequest]:
    """Exactly ``requests`` requests for one server, in order of arrival of their sessions' first.

    Deterministic in all arguments. A later turn carries its session's start as its arrival: when it
    is sent follows from the answer before it.
    """
    if requests < 1 or not workload.rate > 0:
        raise ValueError("requests and rate must be above 0")
    if workload.mix not in MIXES:
        raise ValueError(f"workload: got {workload.mix!r}; must be one of {', '.join(MIXES)}")
    random = np.random.default_rng([seed, server])
    if workload.mix == "bursts":
        return _bursts(workload, requests, random)
    kinds = workload.kinds
    shares = np.array([kind.share for kind in kinds])
    shares = shares / shares.sum()
    turns_per_session = float(sum(shares * [kind.mean_turns for kind in kinds]))
    gaps = random.exponential(turns_per_session / workload.rate, requests)
    starts = np.cumsum(gaps)
    choices = random.choice(len(kinds), size=requests, p=shares)
    made: list[TraceRequest] = []
    for session in range(requests):
        kind = kinds[int(choices[session])]
        turns = int(random.geometric(1.0 / kind.mean_turns))
        prompts = kind.prompt.draw(random, turns)
        outputs = kind.output.draw(random, turns)
        thinking = random.exponential(kind.mean_think_seconds, turns)
        prefix, prefix_tokens = "", 0
        if kind.prefixes:
            prefix = f"{kind.name}-{int(random.integers(kind.prefixes))}"
            prefix_tokens = kind.prefix_tokens
        name = f"{kind.name}-{server}-{session}" if turns > 1 else ""
        length = prefix_tokens
        for turn in range(turns):
            prompt, output = int(prompts[turn]), int(outputs[turn])
            if length + prompt + output > workload.max_tokens:
                if turn:
                    break
                output = min(output, workload.max_tokens // 4)
                prompt = max(1, workload.max_tokens - length - output)
            length += prompt + output
            made.append(
                TraceRequest(
                    arrival_seconds=float(starts[session]),
                    prompt_tokens=prompt,
                    output_tokens=output,
                    kind=kind.name,
                    priority=kind.priority,
                    prefix=prefix,
                    prefix_tokens=prefix_tokens,
                    session=name,
                    think_seconds=float(thinking[turn]),
                )
            )
            if len(made) == requests:
                return made
    raise AssertionError("every session has at least one turn")


def _bursts(workload: Workload, requests: int, random: np.random.Generator) -> list[TraceRequest]:
    bursts = -(-requests // BURST_SIZE)
    starts = np.cumsum(random.exponential(BURST_SIZE / workload.rate, bursts))
    outputs = BURST_OUTPUT.draw(random, requests)
    return [
        TraceRequest(
            arrival_seconds=float(starts[index // BURST_SIZE]),
            prompt_tokens=BURST_OWN_TOKENS,
            output_tokens=int(outputs[index]),
            kind="burst",
            prefix=f"burst-{index // BURST_SIZE}",
            prefix_tokens=BURST_PREFIX_TOKENS,
        )
        for index in range(requests)
    ]
