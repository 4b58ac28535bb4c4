"""What the endpoints share. Belongs to one event loop."""

from __future__ import annotations

import time

from pocket_client.aio import AsyncClient
from pocket_client.gateway.metrics import Metrics
from pocket_client.gateway.readiness import Readiness
from pocket_client.gateway.registry import Registry
from pocket_client.gateway.settings import GatewaySettings


class Service:
    """The upstream client and the gateway's own state."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.client = AsyncClient(settings.upstream)
        self.metrics = Metrics()
        self.registry = Registry(settings.max_in_flight, settings.max_in_flight_per_tenant)
        self.readiness = Readiness(
            self.client, settings.ready_cache_seconds, settings.ready_timeout
        )

    async def aclose(self) -> None:
        await self.client.aclose()
