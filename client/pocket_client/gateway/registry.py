"""Generations under way, by tenant and id, so that they can be cancelled by request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pocket_client.gateway.auth import Tenant
from pocket_client.gateway.errors import overloaded, too_many


class Running:
    """One generation that is counted and can be cancelled, until it leaves."""

    def __init__(self, on_leave: Callable[[Running], None]) -> None:
        self.cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when somebody else's request asks for it."""
        self._on_leave: Callable[[Running], None] | None = on_leave

    def leave(self) -> None:
        """Give the place back. Idempotent."""
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave(self)


class Registry:
    """Belongs to one event loop. A tenant sees only its own requests."""

    def __init__(self, limit: int, limit_per_tenant: int) -> None:
        self._limit = limit
        self._limit_per_tenant = limit_per_tenant
        self._open = 0
        self._open_of: Counter[str] = Counter()
        self._running: dict[tuple[str, str], list[Running]] = {}

    @property
    def open(self) -> int:
        return self._open

    @contextmanager
    def entered(self, tenant: Tenant, ids: tuple[str, ...]) -> Iterator[Running]:
        """Count a generation, under each of its ids, until it leaves: at the end of the block, or
        before that by ``Running.leave``.

        Raises:
            ApiError: as many are running as may, of this tenant (429) or in all (503).
        """
        if self._open_of[tenant.name] >= self._limit_per_tenant:
            raise too_many(f"{self._limit_per_tenant} of your requests are running already")
        if self._open >= self._limit:
            raise overloaded(f"{self._open} requests are open and the limit is {self._limit}")
        keys = [(tenant.name, name) for name in dict.fromkeys(ids)]
        running = Running(lambda running: self._left(tenant, keys, running))
        self._open += 1
        self._open_of[tenant.name] += 1
        for key in keys:
            self._running.setdefault(key, []).append(running)
        try:
            yield running
        finally:
            running.leave()

    def _left(self, tenant: Tenant, keys: list[tuple[str, str]], running: Running) -> None:
        self._open -= 1
        self._open_of[tenant.name] -= 1
        if not self._open_of[tenant.name]:
            del self._open_of[tenant.name]
        for key in keys:
            others = self._running[key]
            others.remove(running)
            if not others:
                del self._running[key]

    def cancel(self, tenant: Tenant, name: str) -> int:
        """Cancel the tenant's requests of that id; returns how many."""
        found = self._running.get((tenant.name, name), [])
        for running in found:
            if not running.cancelled.done():
                running.cancelled.set_result(None)
        return len(found)
