"""What the console's engine view shows: counters and gauges, of which the page makes rates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pocket_client.errors import PocketClientError

if TYPE_CHECKING:
    from pocket_client.gateway.service import Service
    from pocket_client.gateway.upstreams import Upstream

CACHE_SECONDS = 0.5
_STATS_SECONDS = 2.0
_INTER_TOKEN = "pocket_inter_token_latency_seconds"  # noqa: S105  (a metric's name)
_SUMMED = (
    "waiting",
    "running",
    "slots_free",
    "slots_total",
    "blocks_free",
    "blocks_used",
    "blocks_cached",
    "blocks_total",
    "prompt_tokens",
    "generated_tokens",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "steps",
    "preemptions",
)


class Figures:
    """One snapshot for all who watch; nobody watching costs nothing. Belongs to one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._known_until = 0.0
        self._known: dict[str, object] = {}

    async def snapshot(self) -> dict[str, object]:
        """``time`` in seconds of a steady clock, ``engine`` (the sum of all servers that answer,
        None if none does), ``servers``, ``gateway``, ``latencies`` (histograms, None where there is
        none). Counters count from the processes' start."""
        async with self._lock:
            if time.monotonic() >= self._known_until:
                self._known = await self._measure()
                self._known_until = time.monotonic() + CACHE_SECONDS
            return self._known

    async def _measure(self) -> dict[str, object]:
        upstreams = self._service.client.upstreams
        stats = await asyncio.gather(*(_stats(upstream) for upstream in upstreams))
        answered = [one for one in stats if one is not None]
        servers = [
            {
                "healthy": one is not None,
                "open": upstream.open,
                "running": (one or {}).get("running"),
            }
            for upstream, one in zip(upstreams, stats, strict=True)
        ]
        return {
            "time": time.monotonic(),
            "model": self._service.settings.model_name,
            "engine": _sum(answered) if answered else None,
            "servers": servers,
            "gateway": self._gateway(),
            "latencies": {
                "first_token": self._first_token(),
                "inter_token": _inter_token(answered),
            },
        }

    def _gateway(self) -> dict[str, object]:
        read = self._service.metrics.registry.get_sample_value
        prefix = "pocketllm_gateway_"
        return {
            "in_flight": read(f"{prefix}generations_in_flight"),
            "waiting": read(f"{prefix}generations_waiting"),
            "disconnects": read(f"{prefix}client_disconnects_total"),
            "first_token_count": read(f"{prefix}time_to_first_token_seconds_count"),
            "first_token_seconds": read(f"{prefix}time_to_first_token_seconds_sum"),
        }

    def _first_token(self) -> dict[str, object]:
        bounds, counts = self._service.metrics.first_token_counts()
        return {"bounds": bounds, "counts": counts}


async def _stats(upstream: Upstream) -> Mapping[str, object] | None:
    try:
        return await upstream.client.stats(timeout=_STATS_SECONDS)
    except PocketClientError:
        return None


def _sum(stats: list[Mapping[str, object]]) -> dict[str, float]:
    return {name: sum(_number(one, name) for one in stats) for name in _SUMMED}


def _inter_token(stats: list[Mapping[str, object]]) -> dict[str, list[float]] | None:
    """The sum of the servers' histograms; None unless all have the same buckets."""
    found = [_histogram(one) for one in stats]
    bounds = found[0][0] if found else []
    if not bounds or any(other != bounds for other, _ in found):
        return None
    return {
        "bounds": bounds,
        "counts": [sum(row) for row in zip(*(c for _, c in found), strict=True)],
    }


def _histogram(stats: Mapping[str, object]) -> tuple[list[float], list[float]]:
    """Bounds and counts; empty where a server of another version does not have them."""
    histograms = stats.get("histograms")
    found = histograms.get(_INTER_TOKEN) if isinstance(histograms, dict) else None
    values = found if isinstance(found, dict) else {}
    bounds, counts = (_numbers(values.get(name)) for name in ("bounds", "counts"))
    return (bounds, counts) if len(counts) == len(bounds) + 1 else ([], [])


def _numbers(values: object) -> list[float]:
    items = values if isinstance(values, list) else []
    return items if all(isinstance(item, int | float) for item in items) else []


def _number(values: Mapping[str, object], name: str) -> float:
    """Zero where a server of another version does not have it."""
    value = values.get(name, 0)
    return value if isinstance(value, int | float) else 0
