"""What the streams of one HTTP request have used so far."""

from __future__ import annotations

from pocket_client.results import Chunk, Usage


class UsageSum:
    """The latest usage of every output, by prompt."""

    def __init__(self) -> None:
        self._latest: dict[int, dict[int, Usage]] = {}

    def add(self, prompt: int, chunk: Chunk) -> None:
        self._latest.setdefault(prompt, {})[chunk.index] = chunk.usage

    def by_prompt(self) -> list[Usage]:
        """One usage of each prompt: the prompt counts once, however many outputs it has."""
        found = []
        for _, outputs in sorted(self._latest.items()):
            known = max(outputs.values(), key=lambda usage: usage.cached_tokens)
            tokens = sum(usage.completion_tokens for usage in outputs.values())
            found.append(Usage(known.prompt_tokens, tokens, known.cached_tokens))
        return found
