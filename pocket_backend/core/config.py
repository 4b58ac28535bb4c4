"""Scheduling policy settings. docs/scheduling.md says why each default is what it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pocket_backend.api.errors import ConfigurationError, short_repr
from pocket_backend.kv.eviction import POLICIES as EVICTION_POLICIES

SCHEDULING_POLICIES = ("priority", "fcfs", "lpm")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Frozen and validated.

    Raises:
        ConfigurationError: names the field, the value and the remedy.
    """

    policy: str = "priority"
    """``priority``: lower values first, then arrival; ``fcfs``: arrival only; ``lpm``: longest
    cached prefix first."""
    priority_ageing_seconds: float | None = 30.0
    """Waiting this long is worth one level of priority; None: strict, low priorities may starve."""
    lpm_window: int = 32
    """``lpm`` chooses among this many of the oldest waiting requests."""
    lpm_max_overtakes: int = 4
    """After this many admissions past it, the oldest waiting request is next."""
    max_queue: int = 1024
    """Requests that may wait beyond those that could start at once."""
    max_running: int | None = None
    """Sequences that run at once; None: as many as the executor has slots."""
    max_batch_tokens: int | None = None
    """Token budget of a step; None: what the executor can take."""
    reserved_share: float = 0.5
    """Part of a step's prefill budget that no single prompt may use while others have work."""
    watermark: float = 0.01
    """Part of the pool that an admission must leave available for running sequences to grow."""
    enable_prefix_cache: bool = True
    eviction: str = "lru"
    """Which idle cached block goes first: ``lru``, ``lfu`` or ``fifo``."""
    prefix_wait_steps: int = 64
    """A request may be held back for this many steps in all while a running one computes a prefix
    that it shares; 0: never."""
    block_copies: bool = True
    """Whether the executor honours ``ExecuteRequest.block_copies``; False: forks (n > 1) share
    whole blocks only and compute the rest again."""
    queue_timeout_seconds: float | None = None
    """A request that has not started by then fails with DeadlineExceededError."""
    default_deadline_seconds: float | None = None
    """Total time for requests that bring no deadline of their own."""
    seed: int = 0
    """Basis of the seeds of requests that bring none; the engine passes entropy here."""

    def __post_init__(self) -> None:
        _check_choice("policy", self.policy, SCHEDULING_POLICIES)
        _check_choice("eviction", self.eviction, tuple(EVICTION_POLICIES))
        for name in ("priority_ageing_seconds", "queue_timeout_seconds"):
            _check_seconds(name, getattr(self, name))
        _check_seconds("default_deadline_seconds", self.default_deadline_seconds)
        for name, low in (
            ("lpm_window", 1),
            ("lpm_max_overtakes", 0),
            ("max_queue", 0),
            ("max_running", 1),
            ("max_batch_tokens", 1),
            ("prefix_wait_steps", 0),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_running", "max_batch_tokens"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigurationError(
                    f"{name}: got {short_repr(value)}; must be an integer of at least {low}"
                )
        for name in ("reserved_share", "watermark"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0.0 <= value <= 0.9:
                raise ConfigurationError(
                    f"{name}: got {short_repr(value)}; must be a number from 0 to 0.9"
                )


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(
            f"{name}: got {short_repr(value)}; must be one of {', '.join(allowed)}"
        )


def _check_seconds(name: str, value: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(
            f"{name}: got {short_repr(value)}; must be a number of seconds above 0, or None"
        )
    if not math.isfinite(value):
        raise ConfigurationError(f"{name}: got {value}; must be finite (None switches it off)")
