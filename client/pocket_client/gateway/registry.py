"""Generations under way, by tenant and id, so that they can be cancelled by request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pocket_client.gateway.auth import Tenant
from pocket_client.gateway.errors import overloaded, too_many


@dataclass(eq=False, slots=True)
class Running:
    """One generation; ``cancel`` is set at most once."""

    cancel: asyncio.Event


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
        """Count a generation, under each of its ids, while it runs.

        Raises:
            ApiError: as many are running as may, of this tenant (429) or in all (503).
        """
        if self._open_of[tenant.name] >= self._limit_per_tenant:
            raise too_many(f"{self._limit_per_tenant} of your requests are running already")
        if self._open >= self._limit:
            raise overloaded(f"{self._open} requests are open and the limit is {self._limit}")
        running = Running(asyncio.Event())
        keys = [(tenant.name, name) for name in dict.fromkeys(ids)]
        self._open += 1
        self._open_of[tenant.name] += 1
        for key in keys:
            self._running.setdefault(key, []).append(running)
        try:
            yield running
        finally:
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
            running.cancel.set()
        return len(found)
