"""Workloads A, B and C: which token prompts are sent, and what is measured.

| | Prompts | New tokens | At once | Figure |
|---|---|---|---|---|
| A, decode | 64 tokens, distinct | 128 | 1, 2, 4, 8, 16 | generated tokens/s, with prefill |
| B, prefill | 1,024 and 4,096 tokens | 1 | 1 | prompt tokens/s |
| C, shared prefix | 1,024 shared + 32 of their own | 32 | 16 | wall seconds: cold, then warm |

Prompts are windows of English text (the licence texts of a Debian machine, else this project's own)
with random first tokens, so that no window is in a prefix cache by accident.  Everything is a
function of the seed and the round: every engine of a round gets the same prompts, and no two rounds
share any.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DECODE_PROMPT = 64
DECODE_NEW = 128
DECODE_CONCURRENCY = (1, 2, 4, 8, 16)
PREFILL_PROMPTS = (1024, 4096)
SHARED_PREFIX = 1024
SHARED_SUFFIX = 32
SHARED_NEW = 32
SHARED_REQUESTS = 16
RANDOM_TOKENS = 4
"""Random tokens in front of a window: with a vocabulary of thousands no two prompts collide."""

_DEBIAN_LICENCES = Path("/usr/share/common-licenses")
_OWN_LICENCE = Path(__file__).resolve().parent.parent / "LICENSE"

Direction = Literal["higher", "lower"]


def licence_text() -> str:
    """The Debian licence texts, each once and in order of their names; else our own LICENSE."""
    files: dict[Path, None] = {}
    if _DEBIAN_LICENCES.is_dir():
        # Several names are links to the current version: resolve, so that no text comes twice.
        files = dict.fromkeys(sorted(path.resolve() for path in _DEBIAN_LICENCES.iterdir()))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files if path.is_file()]
    return "\n".join(texts) if texts else _OWN_LICENCE.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of a long English text; windows wrap around at its end."""

    tokens: tuple[int, ...]

    @classmethod
    def of(cls, encode: Callable[[str], Sequence[int]]) -> Corpus:
        """Tokenise the licence texts line by line (tokenizers bound the length of one call)."""
        lines = licence_text().splitlines(keepends=True)
        return cls(tuple(token for line in lines for token in encode(line)))

    def window(self, rng: random.Random, length: int) -> tuple[int, ...]:
        """``length`` tokens from a random place, the first few of them random as well."""
        lead = min(RANDOM_TOKENS, length)
        start = rng.randrange(len(self.tokens))
        text = tuple(self.tokens[(start + i) % len(self.tokens)] for i in range(length - lead))
        return tuple(rng.choice(self.tokens) for _ in range(lead)) + text


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that start at once."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class Point:
    """One figure of a batch: a row of the tables."""

    workload: str
    metric: str
    unit: str
    better: Direction


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches that an engine runs one after the other; ``points[i]`` is the figure of batch i."""

    family: Literal["A", "B", "C"]
    concurrency: int
    points: tuple[Point, ...]
    make_batches: Callable[[Corpus, random.Random], tuple[Batch, ...]]

    @property
    def name(self) -> str:
        return "+".join(point.workload for point in self.points)

    def batches(self, corpus: Corpus, seed: int, round_index: int) -> tuple[Batch, ...]:
        """The token prompts of one round: equal for equal arguments, on every machine."""
        # Seeding with a string hashes all of it; integers added up would repeat across workloads.
        rng = random.Random(f"{seed}/{self.name}/{round_index}")
        return self.make_batches(corpus, rng)


def figure_of(point: Point, batch: Batch, wall_seconds: float, generated_tokens: int) -> float:
    """The value of ``point`` for a batch that took ``wall_seconds``."""
    match point.metric:
        case "decode_tokens_per_second":
            return generated_tokens / wall_seconds
        case "prefill_tokens_per_second":
            return batch.prompt_tokens / wall_seconds
        case "wall_seconds":
            return wall_seconds
        case unknown:
            raise ValueError(f"unknown metric {unknown!r}")


def decode_workload(concurrency: int) -> Workload:
    """A: ``concurrency`` distinct prompts of 64 tokens, 128 new tokens each."""

    def make(corpus: Corpus, rng: random.Random) -> tuple[Batch, ...]:
        prompts = tuple(corpus.window(rng, DECODE_PROMPT) for _ in range(concurrency))
        return (Batch(prompts, DECODE_NEW),)

    point = Point(f"A{concurrency}", "decode_tokens_per_second", "tokens/s", "higher")
    return Workload("A", concurrency, (point,), make)


def prefill_workload(length: int) -> Workload:
    """B: one prompt of ``length`` tokens, one new token."""

    def make(corpus: Corpus, rng: random.Random) -> tuple[Batch, ...]:
        return (Batch((corpus.window(rng, length),), 1),)

    point = Point(f"B{length}", "prefill_tokens_per_second", "tokens/s", "higher")
    return Workload("B", 1, (point,), make)


def shared_prefix_workload() -> Workload:
    """C: 16 requests share a fresh prefix (cold), then 16 others share the same one (warm)."""

    def make(corpus: Corpus, rng: random.Random) -> tuple[Batch, ...]:
        prefix = corpus.window(rng, SHARED_PREFIX)

        def batch() -> Batch:
            prompts = (prefix + corpus.window(rng, SHARED_SUFFIX) for _ in range(SHARED_REQUESTS))
            return Batch(tuple(prompts), SHARED_NEW)

        return (batch(), batch())

    points = (
        Point("C cold", "wall_seconds", "s", "lower"),
        Point("C warm", "wall_seconds", "s", "lower"),
    )
    return Workload("C", SHARED_REQUESTS, points, make)


def select_workloads(families: str = "A,B,C", *, quick: bool = False) -> tuple[Workload, ...]:
    """The workloads of the given families; ``quick`` keeps A1, A8, B1024 and C.

    Raises:
        ValueError: an unknown family.
    """
    chosen = {name.strip().upper() for name in families.split(",") if name.strip()}
    if not chosen or chosen - {"A", "B", "C"}:
        raise ValueError(f"workloads: got {families!r}; give a comma list of A, B and C")
    concurrency = (1, 8) if quick else DECODE_CONCURRENCY
    lengths = PREFILL_PROMPTS[:1] if quick else PREFILL_PROMPTS
    everything = (
        *(decode_workload(n) for n in concurrency),
        *(prefill_workload(n) for n in lengths),
        shared_prefix_workload(),
    )
    return tuple(workload for workload in everything if workload.family in chosen)
