"""Uses every KV block once: memory that the pool touches for the first time is no growth."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from pocket_client import Client

PROMPT_TOKENS = 500
_IDS = range(3, 250)
"""Ids that every vocabulary has and that end nothing."""
_BLOCK_TOKENS = 16
NEVER_USED_SHARE = 0.01
"""Of the pool, that may be left: the last prompt's unfilled block, say."""


@dataclass(frozen=True, slots=True)
class Fill:
    """What it took, and whether it got there."""

    requests: int
    seconds: float
    blocks_left: int
    """Blocks that hold nothing, afterwards."""
    blocks_total: int

    @property
    def complete(self) -> bool:
        return self.blocks_left <= self.blocks_total * NEVER_USED_SHARE


def fill_pool(client: Client, *, seed: int = 0, timeout: float = 600.0) -> Fill:
    """Send prompts that share nothing until all of the pool is in use or cached. Nobody else may be
    served meanwhile: what they free is not told from what was never used.

    Needs a server with prefix caching; without it, and with a pool of another block size, it gives
    up after twice as many tokens as the pool holds.
    """
    draw = random.Random(f"fill-{seed}")
    began = time.monotonic()
    sent = 0
    while True:
        stats = client.stats(timeout=timeout)
        left, total = stats["blocks_free"], stats["blocks_total"]
        assert isinstance(left, int)
        assert isinstance(total, int)
        fill = Fill(sent, time.monotonic() - began, left, total)
        if fill.complete or sent * PROMPT_TOKENS > 2 * total * _BLOCK_TOKENS:
            return fill
        prompt = draw.choices(_IDS, k=PROMPT_TOKENS)
        client.generate(prompt, max_tokens=1, timeout=timeout)
        sent += 1
