"""Which server a request should go to so that its prefix is in that server's cache.

Rendezvous hashing: every (prefix, server) pair has a score, and the best score wins, so that a
server that comes or goes moves only the prefixes that it gains or loses. A load bound keeps a
popular prefix from piling up on one server: it spills to its second choice, which then has the
prefix, too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from pocket_client.options import GenerationRequest

PREFIX_BYTES = 256
"""About four KV blocks of text. Shorter than most system prompts with a first question, so that the
turns of one conversation agree; long enough that conversations without a system prompt differ."""
PREFIX_IDS = 64
"""Four KV blocks of token ids."""
LOAD_FACTOR = 1.25
"""A server may have this much more than its even share of the open requests."""


def prefix_key(request: GenerationRequest) -> bytes:
    """What two requests have in common when they begin alike and may share a cache."""
    if request.input_ids is not None:
        start = ",".join(map(str, request.input_ids[:PREFIX_IDS])).encode()
    else:
        text = request.messages_json if request.messages_json is not None else request.text or ""
        start = text[:PREFIX_BYTES].encode("utf-8", "surrogatepass")
    salt = str(request.parameters.get("cache_salt", "")).encode()
    return hashlib.blake2b(salt + b"\0" + start, digest_size=16).digest()


def score(key: bytes, server: str) -> int:
    """Uniform in 64 bits, and independent between servers."""
    digest = hashlib.blake2b(server.encode(), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "big")


def load_bound(open_requests: int, servers: int) -> int:
    """How many a server may have, the new request included, if ``open_requests`` are open now."""
    return math.ceil(LOAD_FACTOR * (open_requests + 1) / servers)


def choose(key: bytes, loads: Mapping[str, int], candidates: Sequence[str]) -> str:
    """The best server of ``candidates``, of which there is at least one.

    Args:
        loads: open requests of each candidate.
    """
    bound = load_bound(sum(loads[server] for server in candidates), len(candidates))
    ranked = sorted(candidates, key=lambda server: (-score(key, server), server))
    for server in ranked:
        if loads[server] < bound:
            return server
    raise AssertionError("the mean is below the bound, so one server is")
