"""What people send: lengths as in shared conversations, sessions that share a prefix. No Locust."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_WORDS = ("river", "seven", "green", "window", "slowly", "answer", "paper", "north", "child",
          "stone", "because", "often", "letter", "under", "simple", "question")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths, the form of published conversation data; medians in words and tokens."""

    prompt_median: float = 60.0
    prompt_sigma: float = 1.0
    output_median: float = 48.0
    output_sigma: float = 0.8
    prompt_max: int = 1200
    output_max: int = 256

    def draw(self, random_source: random.Random) -> tuple[int, int]:
        """(words of the prompt, tokens of the answer), at least one each."""

        def one(median: float, sigma: float, largest: int) -> int:
            value = median * random_source.lognormvariate(0.0, sigma)
            return max(1, min(largest, round(value)))

        return (
            one(self.prompt_median, self.prompt_sigma, self.prompt_max),
            one(self.output_median, self.output_sigma, self.output_max),
        )


def text(random_source: random.Random, words: int) -> str:
    return " ".join(random_source.choices(_WORDS, k=words))


class Session:
    """A conversation that grows turn by turn after a system prompt that all sessions share."""

    SYSTEM = "You are a helpful assistant of a bookshop. " + "Be polite and brief. " * 20

    def __init__(self, random_source: random.Random, turns: int) -> None:
        self._random = random_source
        self._left = turns
        self._messages: list[dict[str, str]] = [{"role": "system", "content": self.SYSTEM}]

    def questions(self) -> Iterator[list[dict[str, str]]]:
        """The messages of each turn; ``answered`` goes between two of them."""
        for _ in range(self._left):
            question = text(self._random, self._random.randint(3, 20))
            self._messages.append({"role": "user", "content": question})
            yield list(self._messages)

    def answered(self, answer: str) -> None:
        self._messages.append({"role": "assistant", "content": answer})
