"""How one gateway runs."""

from __future__ import annotations

from dataclasses import dataclass

from pocket_client.gateway.auth import ApiKeys
from pocket_client.gateway.discovery import parse_upstreams
from pocket_client.options import ENSEMBLE

MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Validated on construction; raises ValueError naming the field and the remedy."""

    upstream: str = "127.0.0.1:8001"
    """The Triton servers, separated by commas: ``host:port`` of a gRPC endpoint, a URL as
    ``Client`` takes it, or ``dns://name:port`` for every address of a name."""
    api_keys: ApiKeys = ApiKeys()  # noqa: RUF009  (frozen)
    """Empty: everybody may use everything, as one tenant."""
    model_name: str = ENSEMBLE
    """The id under which the model is listed and must be asked for."""
    request_timeout: float = 600.0
    """Seconds from a request's arrival to the end of its answer."""
    max_body_bytes: int = 8 << 20
    max_choices: int = 16
    """Prompts of a list times ``n``, of one request."""
    max_in_flight: int = 256
    """Generation requests at a time; beyond that they wait, or get 503 with Retry-After."""
    max_waiting: int = 0
    """Generation requests that may wait for a place. A free place goes to the tenant with the
    fewest running requests."""
    max_waiting_per_tenant: int = 100_000
    """Of these, of one tenant; beyond that 429 with Retry-After."""
    max_wait_seconds: float = 30.0
    """How long one may wait; then 503 with Retry-After."""
    requests_per_minute: int | None = None
    """Generation requests of one tenant in a minute, ten seconds' worth at once; then 429."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers of one tenant in a minute, a minute's worth at once; then
    429."""
    max_in_flight_per_tenant: int = 100_000
    """Of one API key's tenant; beyond that 429 with Retry-After."""
    body_seconds: float = 30.0
    """How long a client may take to send its body."""
    ready_cache_seconds: float = 2.0
    ready_timeout: float = 10.0
    console: bool = True
    """Serve the web console at ``/``."""
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Names beyond localhost that the Host header may have while no API keys are set: a web page
    could otherwise reach this server by pointing its own name at it."""

    def __post_init__(self) -> None:
        parse_upstreams(self.upstream)
        for name in ("request_timeout", "body_seconds", "ready_timeout", "max_wait_seconds"):
            if not 0 < getattr(self, name) <= 86_400:
                raise ValueError(
                    f"{name}: got {getattr(self, name)}; must be above 0, at most 86400"
                )
        for name, high in (
            ("max_body_bytes", 1 << 30),
            ("max_choices", MAX_CHOICES),
            ("max_in_flight", 100_000),
            ("max_in_flight_per_tenant", 100_000),
        ):
            if not 1 <= getattr(self, name) <= high:
                raise ValueError(f"{name}: got {getattr(self, name)}; must be from 1 to {high}")
        for name, low, high in (
            ("max_waiting", 0, 100_000),
            ("max_waiting_per_tenant", 1, 100_000),
            ("requests_per_minute", 1, 100_000),
            ("tokens_per_minute", 1, 10**12),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}: got {value}; must be from {low} to {high}")
        if self.ready_cache_seconds < 0:
            raise ValueError(f"ready_cache_seconds: got {self.ready_cache_seconds}; at least 0")
        if not self.model_name:
            raise ValueError("model_name: must not be empty")
