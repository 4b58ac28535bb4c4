"""What a benchmark needs of an engine.  Standard library only: workers of peers import this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Prompts = Sequence[Sequence[int]]
"""Token ids, one sequence per request."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How every engine of a comparison is started; adapters map it to their own settings.

    ``threads`` compute threads; at most ``max_sequences`` requests at once, each of at most
    ``max_model_len`` tokens (prompt and output), in a KV pool of ``kv_cache_tokens`` tokens where
    the engine lets one choose.  ``extra`` holds an engine's own settings (plain JSON values).
    """

    model: str
    threads: int = 2
    max_sequences: int = 16
    max_model_len: int = 4608
    kv_cache_tokens: int = 40960
    prefix_caching: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One request of a batch; seconds count from the moment the whole batch was handed over.

    ``first_token_seconds`` is None where the engine does not tell.
    """

    token_ids: tuple[int, ...]
    finished_seconds: float
    first_token_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Requests in the order of their prompts; ``wall_seconds`` until the last one finished.

    ``cpu_seconds``: CPU time meanwhile, by process, of an engine that is made of several.
    ``step_seconds``: by part of a step, one value for each step, of an engine that was asked.
    """

    requests: tuple[RequestTimes, ...]
    wall_seconds: float
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    step_seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def generated_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)


class Engine(Protocol):
    """A loaded model that continues batches of token prompts greedily, ignoring end of sequence.

    Not thread-safe; one batch at a time.  The first ``run`` may still compile or allocate: callers
    warm up first.
    """

    name: str

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        """Load the model; returns facts to report (version, precision, ``load_seconds``)."""

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        """Start all ``prompts`` at once and return when each has ``max_new_tokens`` new tokens."""

    def close(self) -> None:
        """Release the model.  Idempotent."""


class EngineFailure(RuntimeError):  # noqa: N818  (a failure is what happened to the engine)
    """An engine could not be started, ended early, or returned something else than was asked."""


def check_result(name: str, result: BatchResult, requests: int, max_new_tokens: int) -> BatchResult:
    """``result``, if it holds what was asked for.

    Raises:
        EngineFailure: requests or tokens are missing; a figure from it would flatter the engine.
    """
    counts = [len(request.token_ids) for request in result.requests]
    if counts != [max_new_tokens] * requests:
        raise EngineFailure(f"{name}: asked for {requests} x {max_new_tokens} tokens, got {counts}")
    return result
