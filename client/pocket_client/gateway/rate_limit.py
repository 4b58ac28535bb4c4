"""How many requests and tokens a tenant may use in a minute.

A request's tokens are known when it ends. So what it will probably use is taken when it comes,
which may be refused, and the account is settled by what it used: a difference in its favour is
given back, and one against it is owed, which the requests after it wait for. Over time nobody gets
more than the rate, whatever was expected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pocket_client.gateway.errors import too_many

REQUESTS = "requests"
TOKENS = "tokens"
_INSTANT = 1e-6
"""Seconds: less is rounding, and no reason to refuse."""
RATE_HEADERS = tuple(
    f"x-ratelimit-{figure}-{kind}"
    for kind in (REQUESTS, TOKENS)
    for figure in ("limit", "remaining", "reset")
)


@dataclass(slots=True)
class TokenBucket:
    """Pure: the time, in seconds, is passed in. Starts full. What it holds may be owed."""

    rate: float
    """Units added in a second."""
    burst: float
    """Most that it holds."""
    _level: float = field(init=False)
    _updated: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self._level = self.burst

    def level(self, now: float) -> float:
        """What it holds; below 0: what is owed."""
        passed = max(0.0, now - self._updated)
        self._level = min(self.burst, self._level + passed * self.rate)
        self._updated = now
        return self._level

    def wait(self, now: float, amount: float) -> float:
        """Seconds until it holds ``amount``, which is at most ``burst``."""
        wait = (amount - self.level(now)) / self.rate
        return wait if wait > _INSTANT else 0.0

    def take(self, now: float, amount: float = 1.0) -> float:
        """Take and return 0, or return the seconds until that can be done."""
        wait = self.wait(now, amount)
        if wait == 0.0:
            self._level -= amount
        return wait

    def give_back(self, amount: float) -> None:
        """What was taken beyond need; below 0: what was used beyond what was taken."""
        self._level += amount


class Grant:
    """What one request took. Not settled, it stays taken."""

    def __init__(self, bucket: TokenBucket | None, taken: int) -> None:
        self._bucket = bucket
        self._taken = taken

    def settle(self, used: int) -> None:
        """Replace what was taken by what was used; only the first call counts."""
        bucket, self._bucket = self._bucket, None
        if bucket is not None:
            bucket.give_back(self._taken - used)


class RateLimiter:
    """Buckets for each tenant; tenants come from the key file, so there are few."""

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = {REQUESTS: requests_per_minute, TOKENS: tokens_per_minute}
        self._clock = clock
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    @property
    def counts_tokens(self) -> bool:
        return self._limits[TOKENS] is not None

    def admit(self, tenant: str, tokens: int) -> Grant:
        """Count a request that will probably use ``tokens``. One that needs more than a minute's
        worth needs all of that; the rest is settled afterwards.

        Raises:
            ApiError: 429 beyond a rate, with the seconds to wait in Retry-After. Nothing is taken.
        """
        now = self._clock()
        requests, of_tokens = self._bucket(tenant, REQUESTS), self._bucket(tenant, TOKENS)
        needed = 0
        if of_tokens is not None:
            needed = min(tokens, int(of_tokens.burst))
            if of_tokens.wait(now, needed):
                raise self._refusal(TOKENS, of_tokens, needed, now)
        if requests is not None and requests.take(now):
            raise self._refusal(REQUESTS, requests, 1, now)
        if of_tokens is not None:
            of_tokens.take(now, needed)
        return Grant(of_tokens, needed)

    def headers(self, tenant: str) -> Mapping[str, str]:
        """OpenAI's: limit, what is left, and the time until all of it is there again."""
        now = self._clock()
        found = {}
        for kind, limit in self._limits.items():
            bucket = self._bucket(tenant, kind)
            if bucket is not None:
                found[f"x-ratelimit-limit-{kind}"] = str(limit)
                found[f"x-ratelimit-remaining-{kind}"] = str(_whole(bucket.level(now)))
                found[f"x-ratelimit-reset-{kind}"] = duration(bucket.wait(now, bucket.burst))
        return found

    def _bucket(self, tenant: str, kind: str) -> TokenBucket | None:
        limit = self._limits[kind]
        if limit is None:
            return None
        bucket = self._buckets.get((tenant, kind))
        if bucket is None:
            # Requests come ten seconds' worth at once; one prompt may need a minute's tokens.
            burst = limit if kind == TOKENS else max(1, limit // 6)
            bucket = self._buckets[tenant, kind] = TokenBucket(limit / 60.0, float(burst))
        return bucket

    def _refusal(self, kind: str, bucket: TokenBucket, needed: int, now: float) -> Exception:
        wait = bucket.wait(now, needed)
        message = (
            f"{kind} per minute: limit {self._limits[kind]}, {_whole(bucket.level(now))} left, "
            f"{needed} needed; there is room in {duration(wait)}"
        )
        return too_many(message, retry_after=max(1, math.ceil(wait)))


def _whole(level: float) -> int:
    return max(0, math.floor(level + 1e-3))


def duration(seconds: float) -> str:
    """As OpenAI writes it: ``0s``, ``120ms``, ``6m0s``, ``1h0m30s``."""
    milliseconds = math.ceil(1000 * seconds - 1e-3)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    minutes, left = divmod(math.ceil(milliseconds / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{left}s"
    return f"{minutes}m{left}s" if minutes else f"{left}s"
