"""What one HTTP request will probably use, and what its streams have used so far."""

from __future__ import annotations

import math

from pocket_client.gateway.translate import Generation
from pocket_client.results import Chunk, Usage

BYTES_PER_TOKEN = 4
"""Of text, about; the gateway has no tokenizer."""


def expected_tokens(generation: Generation) -> int:
    """Of the prompts, and the most that may be generated, where the client limits that."""
    total = 0
    for request in generation.requests:
        if request.input_ids is not None:
            total += len(request.input_ids)
        else:
            text = request.messages_json if request.messages_json is not None else request.text
            size = len((text or "").encode("utf-8", "surrogatepass"))
            total += math.ceil(size / BYTES_PER_TOKEN)
        limit = request.parameters.get("max_tokens")
        if isinstance(limit, int):
            total += limit * generation.n
    return total


class UsageSum:
    """The latest usage of every output, by prompt."""

    def __init__(self) -> None:
        self._latest: dict[int, dict[int, Usage]] = {}

    def add(self, prompt: int, chunk: Chunk) -> None:
        self._latest.setdefault(prompt, {})[chunk.index] = chunk.usage

    @property
    def total_tokens(self) -> int:
        return sum(usage.total_tokens for usage in self.by_prompt())

    def by_prompt(self) -> list[Usage]:
        """One usage of each prompt: the prompt counts once, however many outputs it has."""
        found = []
        for _, outputs in sorted(self._latest.items()):
            known = max(outputs.values(), key=lambda usage: usage.cached_tokens)
            tokens = sum(usage.completion_tokens for usage in outputs.values())
            found.append(Usage(known.prompt_tokens, tokens, known.cached_tokens))
        return found
