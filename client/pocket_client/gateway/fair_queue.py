"""Who runs next when not everybody can: the tenant that has the fewest requests running."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from pocket_client.gateway.errors import overloaded, too_many

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """Pure: at most ``places`` items run; the others wait, in order within a tenant.

    A free place goes to the waiting tenant with the fewest running items; among equals to the one
    that was served, or came, longest ago. So a tenant with nothing running lets every other one go
    first at most once, however many requests they send, and no place is free while somebody waits.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        self._served: dict[str, int] = {}
        self._turn = itertools.count(1)

    @property
    def running(self) -> int:
        return self._running.total()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waiting_of(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    def add(self, tenant: str, item: Item) -> None:
        self._waiting.setdefault(tenant, deque()).append(item)
        if tenant not in self._served:
            self._served[tenant] = next(self._turn)

    def withdraw(self, tenant: str, item: Item) -> bool:
        """Take back what waits; False if it does not wait (any more)."""
        items = self._waiting.get(tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        self._forget(tenant)
        return True

    def start(self) -> Item | None:
        """The item that may run now, counted as running; None: no place, or nobody waits."""
        if not self._waiting or self.running >= self._places:
            return None
        tenant = min(self._waiting, key=lambda name: (self._running[name], self._served[name]))
        item = self._waiting[tenant].popleft()
        self._running[tenant] += 1
        self._served[tenant] = next(self._turn)
        self._forget(tenant)
        return item

    def finish(self, tenant: str) -> None:
        """One of the tenant's running items is done."""
        self._running[tenant] -= 1
        assert self._running[tenant] >= 0, tenant
        self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        """Tenants that neither wait nor run cost nothing."""
        if not self._waiting.get(tenant, True):
            del self._waiting[tenant]
        if not self._running[tenant]:
            del self._running[tenant]
            if tenant not in self._waiting:
                self._served.pop(tenant, None)


class Turn:
    """A place among the running. ``leave`` is idempotent."""

    def __init__(self, admission: Admission, tenant: str) -> None:
        self._admission: Admission | None = admission
        self._tenant = tenant

    def leave(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.finished(self._tenant)


class Admission:
    """``FairQueue`` for tasks of one event loop."""

    def __init__(
        self, places: int, waiting: int, waiting_per_tenant: int, wait_seconds: float
    ) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(places)
        self._limit = waiting
        self._limit_per_tenant = waiting_per_tenant
        self._wait_seconds = wait_seconds

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    async def turn(self, tenant: str) -> Turn:
        """Wait for a place; the caller leaves it. Cancelling the task withdraws it.

        Raises:
            ApiError: too many wait, of this tenant (429) or in all (503), or it took too long
                (503).
        """
        ticket = asyncio.get_running_loop().create_future()
        self._queue.add(tenant, ticket)
        self._start()
        turn = Turn(self, tenant)
        if ticket.done():
            return turn
        if self._queue.waiting_of(tenant) > self._limit_per_tenant:
            self._queue.withdraw(tenant, ticket)
            raise too_many(f"{self._limit_per_tenant} of your requests are waiting already")
        if self._queue.waiting > self._limit:
            self._queue.withdraw(tenant, ticket)
            raise overloaded(f"{self._limit} requests are waiting already; retry later")
        try:
            async with asyncio.timeout(self._wait_seconds):
                await ticket
        except TimeoutError:
            self._abandon(tenant, ticket)
            raise overloaded(f"no place was free for {self._wait_seconds:g} s") from None
        except asyncio.CancelledError:
            self._abandon(tenant, ticket)
            raise
        return turn

    def finished(self, tenant: str) -> None:
        self._queue.finish(tenant)
        self._start()

    def _abandon(self, tenant: str, ticket: asyncio.Future[None]) -> None:
        if not self._queue.withdraw(tenant, ticket):  # it was started just now
            self.finished(tenant)

    def _start(self) -> None:
        while (ticket := self._queue.start()) is not None:
            if not ticket.done():  # else its task was just cancelled, and will abandon it
                ticket.set_result(None)
