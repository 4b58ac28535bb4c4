"""Which server a request should go to so that its prefix is in that server's cache.

Rendezvous hashing: every (prefix, server) pair has a score, and the best score wins, so that a
server that comes or goes moves only the prefixes that it gains or loses, and several gateways
agree without talking. A load limit keeps a popular prefix from piling up on one server: it spills
to another one, which then has it, too, and from then on whichever of them has less to do is asked.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping

from pocket_client.options import GenerationRequest

PREFIX_BYTES = 256
"""About four KV blocks of text. Shorter than most system prompts with a first question, so that the
turns of one conversation agree; long enough that conversations without a system prompt differ."""
PREFIX_IDS = 64
"""Four KV blocks of token ids."""
LOAD_FACTOR = 0.25
"""A server may have this share of the mean more open requests than the least loaded one."""
KNOWN_SLACK = 6
"""With few requests open, a server that has the prefix may have this many more: computing a prefix
again delays everybody there, waiting behind a few prefix hits does not (docs/benchmarks.md)."""
NEW_SLACK = 1
"""Likewise for a prefix that no server has: it should go to its own server, so that gateways agree,
but there is nothing yet to gain from a longer queue."""
REMEMBERED = 8192
"""Prefixes; many times what the caches of a few servers hold."""


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


def load_limit(loads: Collection[int], slack: int) -> float:
    """The most open requests that a server may have to be given one more."""
    return min(loads) + max(slack, LOAD_FACTOR * sum(loads) / len(loads))


def choose(key: bytes, loads: Mapping[str, int], known: Collection[str] = ()) -> str:
    """The server for a prefix.

    Args:
        loads: open requests of each candidate, of which there is at least one.
        known: servers that were given the prefix before, candidates or not.
    """
    ranked = sorted(loads, key=lambda server: (-score(key, server), server))
    limit = load_limit(loads.values(), KNOWN_SLACK)
    having = [server for server in ranked if server in known and loads[server] <= limit]
    if having:
        return min(having, key=loads.__getitem__)  # of several, the best by score
    limit = load_limit(loads.values(), NEW_SLACK)
    return next(server for server in ranked if loads[server] <= limit)


class PrefixRoutes:
    """Chooses servers, and remembers which ones were given a prefix. Belongs to one event loop."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._capacity = capacity
        self._members: frozenset[str] = frozenset()
        self._servers: OrderedDict[bytes, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._servers)

    def meet(self, members: Collection[str]) -> None:
        """These are the servers now. What one that left had cached cannot be relied on; when one
        joins, every prefix goes to its own server again, or the new one would get no old ones."""
        now = frozenset(members)
        if now == self._members:
            return
        if now - self._members:
            self._servers.clear()
        for known in self._servers.values():
            known &= now
        self._members = now

    def choose(self, key: bytes, loads: Mapping[str, int]) -> str:
        """As the function of that name, for a request that is then sent there."""
        known = self._servers.setdefault(key, set())
        self._servers.move_to_end(key)
        if len(self._servers) > self._capacity:
            self._servers.popitem(last=False)
        server = choose(key, loads, known)
        known.add(server)
        return server
