"""``UnifiedEngine``: continuous batching over any ``BackendExecutor``, in one object."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pocket_backend.engine.streams import EventSink, TokenStream

if TYPE_CHECKING:
    from pocket_backend.api import EngineArgs, GenerationRequest, SamplingParams
    from pocket_backend.core.step import MemoryInfo
    from pocket_backend.engine.loop import StepHook
    from pocket_backend.engine.stats import EngineStats
    from pocket_backend.executors.base import BackendExecutor
    from pocket_backend.observability.health import HealthStatus
    from pocket_backend.text import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """An accepted request."""

    request_id: str
    engine: UnifiedEngine

    def cancel(self) -> bool:
        return self.engine.cancel(self.request_id)


class UnifiedEngine:
    """Owns the executor, the scheduler, the engine thread and the output stage.

    ::

        with UnifiedEngine(backend, max_batch_size=8, max_total_tokens=8192) as engine:
            for event in engine.generate(prompt_tokens=[1, 2, 3], max_tokens=100):
                if event["type"] == "token":
                    print(event["token_id"])

    Without a tokenizer it works on token ids only: events carry no text and stop *strings* are
    refused. With one, it obeys the text rule (docs/architecture.md).

    Thread contract: all methods from any thread. ``close`` is called at interpreter exit and when
    the object is collected, if nobody did before.
    """

    def __init__(
        self,
        backend: BackendExecutor,
        max_batch_size: int = 8,
        max_total_tokens: int = 8192,
        *,
        tokenizer: Tokenizer | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        max_queue: int = 1024,
        enable_prefix_caching: bool = True,
        stall_seconds: float = 60.0,
        failure_limit: int = 3,
        clock: Callable[[], float] = time.monotonic,
        on_step_end: Sequence[StepHook] = (),
        name: str = "pocket-engine",
    ) -> None:
        """Take ownership of ``backend`` and start the engine thread.

        Args:
            max_batch_size: sequences that run at once (also bounded by the executor's slots).
            max_total_tokens: KV tokens that all running sequences may hold together (also bounded
                by the executor's pool).
            max_num_batched_tokens: token budget of a step; None: the executor's.
            max_model_len: tokens (prompt and output) per sequence; None: the executor's.
            max_queue: requests that may wait.
            on_step_end: called on the engine thread after each step and its events.
        """

    @classmethod
    def from_args(
        cls, args: EngineArgs, *, on_step_end: Sequence[StepHook] = ()
    ) -> UnifiedEngine:
        """Load executor and tokenizer as ``args`` say, and start."""

    def submit(self, request: GenerationRequest, sink: EventSink) -> RequestHandle:
        """Validate and hand over; events go to ``sink`` on the engine thread (engine/streams.py).

        Raises (nothing was admitted then, and ``sink`` is never called):
            InvalidRequestError: empty prompt, token ids outside the vocabulary, prompt beyond the
                context, a duplicate ``request_id``, ...
            UnsupportedFeatureError: the backend lacks a feature that the parameters need.
            OverloadedError: too many requests are open, or the engine is closing.
            BackendUnavailableError: the engine is dead.

        What is only known later (queue full on admission, deadline, a failed computation) comes as
        the last event, with ``finish_reason="error"`` and ``error``.
        """

    def stream(self, request: GenerationRequest) -> TokenStream:
        """``submit`` with a thread-safe stream to iterate over."""

    def generate(
        self,
        prompt_tokens: Sequence[int],
        max_tokens: int | None = None,
        *,
        request_id: str | None = None,
        sampling_params: SamplingParams | None = None,
        **sampling: object,
    ) -> Iterator[dict[str, object]]:
        """Yield ``{"type": "token", "token_id", "text", ...}`` per token, then one ``"finish"``.

        The finish event has ``finish_reason``, ``stop_reason``, ``usage`` and ``timings``
        (dictionaries) and ``text`` that was still held back. A failed request raises its error.
        Closing the generator (or leaving the loop early) cancels the request. The request is
        validated and submitted at the call, not at the first ``next``.
        """

    def cancel(self, request_id: str) -> bool:
        """End a request in any state; False if none of that id is open."""

    def post(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the engine thread soon (Triton: the only thread that may send)."""

    def add_step_hook(self, hook: StepHook) -> None:
        """Call ``hook(report)`` on the engine thread after each step."""

    def stats(self) -> EngineStats:
        """Counters and gauges as of the last step."""

    def health(self) -> HealthStatus:
        """Health now, without waiting for the engine thread."""

    @property
    def memory_info(self) -> MemoryInfo:
        """Sizes of the executor (vocabulary, context, blocks)."""

    @property
    def max_model_len(self) -> int:
        """Tokens (prompt and output) that one request may have."""

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let open ones run for ``drain_seconds``, fail the rest, release.

        Idempotent; joins the engine thread unless called on it.
        """
