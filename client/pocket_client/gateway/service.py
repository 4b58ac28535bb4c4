"""What the endpoints share. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import os
import time

from pocket_client.gateway.discovery import parse_upstreams
from pocket_client.gateway.fair_queue import Admission
from pocket_client.gateway.metrics import Metrics
from pocket_client.gateway.rate_limit import RateLimiter
from pocket_client.gateway.readiness import Readiness
from pocket_client.gateway.registry import Registry
from pocket_client.gateway.settings import GatewaySettings
from pocket_client.gateway.tracing import tracing_from_environment
from pocket_client.gateway.upstreams import UpstreamPool


class Service:
    """The upstream client and the gateway's own state."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises ValueError if the environment asks for spans that cannot be had."""
        self.settings = settings
        self.created = int(time.time())
        self.metrics = Metrics()
        self.tracing = tracing_from_environment(os.environ)
        self.client = UpstreamPool(parse_upstreams(settings.upstream), self.metrics)
        self.registry = Registry(
            settings.max_in_flight + settings.max_waiting, settings.max_in_flight_per_tenant
        )
        self.rate_limiter = RateLimiter(settings.requests_per_minute, settings.tokens_per_minute)
        self.admission = Admission(
            settings.max_in_flight,
            settings.max_waiting,
            settings.max_waiting_per_tenant,
            settings.max_wait_seconds,
        )
        self.metrics.waiting.set_function(lambda: self.admission.waiting)
        self.readiness = Readiness(
            self.client, settings.ready_cache_seconds, settings.ready_timeout
        )

    async def start(self) -> None:
        """On the event loop that will serve."""
        await self.client.start()

    async def aclose(self) -> None:
        await self.client.aclose()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
