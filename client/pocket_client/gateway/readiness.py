"""Whether the server can answer: by a real inference, since Triton's own readiness stays 200 when
the process behind a model is dead."""

from __future__ import annotations

import asyncio
import time

from pocket_client.errors import OverloadedError, PocketClientError
from pocket_client.gateway.upstreams import UpstreamPool


class Readiness:
    """Probes at most once per ``cache_seconds``, and not at all while real answers arrive."""

    def __init__(self, client: UpstreamPool, cache_seconds: float, timeout: float) -> None:
        self._client = client
        self._cache_seconds = cache_seconds
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._known_until = 0.0
        self._problem: str | None = "not probed yet"

    def answered(self) -> None:
        """Some client just got a part of an answer."""
        self._learn(None)

    async def problem(self) -> str | None:
        """None: ready."""
        async with self._lock:
            if time.monotonic() >= self._known_until:
                self._learn(await self._probe())
            return self._problem

    def _learn(self, problem: str | None) -> None:
        self._problem = problem
        self._known_until = time.monotonic() + self._cache_seconds

    async def _probe(self) -> str | None:
        try:
            await self._client.generate("Hi", max_tokens=1, timeout=self._timeout)
        except OverloadedError:
            return None  # busy, and quick to say so
        except PocketClientError as error:
            return type(error).__name__
        return None
