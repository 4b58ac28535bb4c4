"""How many requests a tenant may send in a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from pocket_client.gateway.errors import too_many


@dataclass(slots=True)
class TokenBucket:
    """Pure: the time, in seconds, is passed in. Starts full."""

    rate: float
    """Tokens added in a second."""
    burst: float
    """Most that it holds."""
    _tokens: float = -1.0
    _updated: float = 0.0

    def take(self, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        if self._tokens < 0:
            self._tokens, self._updated = self.burst, now
        passed = max(0.0, now - self._updated)
        self._tokens = min(self.burst, self._tokens + passed * self.rate)
        self._updated = now
        if self._tokens >= 1.0:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self.rate


class RateLimiter:
    """One bucket for each tenant; tenants come from the key file, so there are few."""

    def __init__(
        self, requests_per_minute: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_minute = requests_per_minute
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    def check(self, tenant: str) -> None:
        """Raises ApiError (429, with the seconds to wait in Retry-After) beyond the rate."""
        if self._per_minute is None:
            return
        bucket = self._buckets.get(tenant)
        if bucket is None:
            burst = float(max(1, self._per_minute // 6))  # ten seconds' worth at once
            bucket = self._buckets[tenant] = TokenBucket(self._per_minute / 60.0, burst)
        wait = bucket.take(self._clock())
        if wait:
            message = f"{self._per_minute} requests per minute are allowed"
            raise too_many(message, retry_after=math.ceil(wait))
