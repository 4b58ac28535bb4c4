"""``UnifiedEngine``: continuous batching over any ``BackendExecutor``, in one object."""

from __future__ import annotations

import logging
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pocket_backend.api import (
    ConfigurationError,
    GenerationRequest,
    InvalidRequestError,
    SamplingParams,
    UnsupportedFeatureError,
)
from pocket_backend.engine.loop import EngineLoop, LoopOptions
from pocket_backend.engine.stepper import EngineStepper
from pocket_backend.engine.streams import EventSink, TokenStream
from pocket_backend.engine.validation import RequestLimits, token_tuple, validate_request
from pocket_backend.observability.logging import get_logger, log_event

if TYPE_CHECKING:
    from pocket_backend.api import BackendCapabilities, EngineArgs, TokenEvent
    from pocket_backend.core.step import MemoryInfo
    from pocket_backend.engine.loop import StepHook
    from pocket_backend.engine.stats import EngineStats
    from pocket_backend.executors.base import BackendExecutor
    from pocket_backend.observability.health import HealthStatus
    from pocket_backend.text.tokenizer import Tokenizer

_log = get_logger("engine")


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """An accepted request."""

    request_id: str
    engine: UnifiedEngine

    def cancel(self) -> bool:
        """``UnifiedEngine.cancel`` of this request."""
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
        eos_token_ids: Collection[int] | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        max_queue: int = 1024,
        enable_prefix_caching: bool = True,
        default_deadline_seconds: float | None = None,
        stall_seconds: float = 60.0,
        failure_limit: int = 8,
        clock: Callable[[], float] = time.monotonic,
        on_step_end: Sequence[StepHook] = (),
        name: str = "pocket-engine",
    ) -> None:
        """Take ownership of ``backend`` and start the engine thread.

        Args:
            max_batch_size: sequences that run at once (also bounded by the executor's slots).
            max_total_tokens: KV tokens that all running sequences may hold together (also bounded
                by the executor's pool); rounded down to whole blocks.
            eos_token_ids: ids that end a request; None: the tokenizer's, else the backend's.
            max_num_batched_tokens: token budget of a step; None: the executor's.
            max_model_len: tokens (prompt and output) per sequence; None: the executor's.
            max_queue: requests that may wait beyond those that could start at once.
            default_deadline_seconds: from arrival, for requests that bring none of their own.
            stall_seconds: work without progress for this long is reported and turns health to
                ``stalled``.
            failure_limit: steps failing in a row until the engine is dead (a failed step of
                several requests is repeated one by one, so a bad request costs two of them).
            on_step_end: called on the engine thread after each step and its events.

        Raises:
            ConfigurationError: limits that cannot work together.
        """
        memory = backend.get_memory_info()
        for field, value, low in (
            ("max_batch_size", max_batch_size, 1),
            ("max_total_tokens", max_total_tokens, memory.block_size),
        ):
            if type(value) is not int or value < low:
                raise ConfigurationError(
                    f"{field}: got {value!r}; must be an integer of at least {low}"
                )
        context = memory.max_context
        if max_model_len is not None:
            if max_model_len > context:
                raise ConfigurationError(
                    f"max_model_len: got {max_model_len}; the backend's context is {context}"
                )
            context = max_model_len
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer else backend.eos_token_ids
        self._backend = backend
        self._memory = memory
        self._tokenizer = tokenizer
        self._max_model_len = context
        self.max_batch_size = min(max_batch_size, memory.max_slots)
        self.max_queue = max_queue
        self._stepper = stepper = EngineStepper.build(
            backend,
            max_batch_size=self.max_batch_size,
            max_total_tokens=max_total_tokens,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=context,
            max_queue=max_queue,
            eos_token_ids=frozenset(eos_token_ids),
            enable_prefix_caching=enable_prefix_caching,
            default_deadline_seconds=default_deadline_seconds,
            token_bytes=tokenizer.token_bytes if tokenizer else None,
            failure_limit=failure_limit,
            clock=clock,
        )
        vocab = memory.vocab_size
        if tokenizer is not None and tokenizer.vocab_size != vocab:
            log_event(
                _log,
                logging.WARNING,
                "tokenizer and backend differ in vocabulary size",
                tokenizer=tokenizer.vocab_size,
                backend=vocab,
            )
            vocab = min(vocab, tokenizer.vocab_size)
        self._limits = RequestLimits(
            vocab_size=vocab,
            max_model_len=context,
            capacity_tokens=stepper.capacity_tokens,
            has_tokenizer=tokenizer is not None,
            supports_feature=backend.supports_feature,
        )
        self._loop = EngineLoop(
            stepper,
            LoopOptions(
                stall_seconds=stall_seconds,
                max_open_requests=max_queue + self.max_batch_size,
                name=name,
            ),
            clock=clock,
            on_step_end=on_step_end,
        )
        self._loop.start()
        # For an engine that is dropped without close; the loop does not refer back to it. It only
        # asks: a collector that waits for a thread could wait for itself. At exit the loop stops
        # itself.
        self._finalizer = weakref.finalize(self, self._loop.ask_to_stop)
        self._finalizer.atexit = False

    @classmethod
    def from_args(cls, args: EngineArgs, *, on_step_end: Sequence[StepHook] = ()) -> UnifiedEngine:
        """Load executor and tokenizer as ``args`` say, and start.

        Raises:
            ModelLoadError, ConfigurationError, BackendUnavailableError,
            BackendNotImplementedError: as ``create_executor`` and ``load_tokenizer``.
        """
        from pocket_backend.engine.build import build_backend

        args = args.resolved()
        backend, tokenizer = build_backend(args)
        memory = backend.get_memory_info()
        try:
            return cls(
                backend,
                max_batch_size=args.max_batch_size if args.enable_batching else 1,
                max_total_tokens=args.kv_cache_tokens or memory.num_blocks * memory.block_size,
                tokenizer=tokenizer,
                max_num_batched_tokens=min(args.max_num_batched_tokens, memory.max_batch_tokens),
                max_model_len=None
                if args.max_model_len is None
                else min(args.max_model_len, memory.max_context),
                max_queue=args.max_queue,
                enable_prefix_caching=args.enable_prefix_caching,
                default_deadline_seconds=args.request_timeout_seconds,
                on_step_end=on_step_end,
            )
        except BaseException:
            backend.close()
            raise

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
        validate_request(request, self._limits)
        self._loop.submit(self._stepper.entry(request, sink))
        return RequestHandle(request.request_id, self)

    def stream(self, request: GenerationRequest) -> TokenStream:
        """``submit`` with a thread-safe stream to iterate over."""
        stream = TokenStream(request.request_id, self.cancel)
        try:
            self.submit(request, stream.sink)
        except BaseException:
            stream.detach()
            raise
        return stream

    def generate(
        self,
        prompt_tokens: Sequence[int],
        max_tokens: int | None = None,
        *,
        request_id: str | None = None,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
        **sampling: object,
    ) -> EventDicts:
        """Yield ``{"type": "token", "token_id", "text"}`` per token, then one ``"finish"``.

        The finish event has ``finish_reason``, ``stop_reason``, ``usage`` and ``timings``
        (dictionaries) and ``text`` that was still held back; the texts of all events join to the
        output's. A failed request raises its error instead. Closing the iterator (or leaving the
        loop early) cancels the request. The request is validated and submitted at the call, not at
        the first ``next``.

        Args:
            sampling: fields of ``SamplingParams``, unless ``sampling_params`` is given.
        """
        if sampling_params is None:
            sampling_params = make_sampling_params(max_tokens=max_tokens, **sampling)
        elif sampling or max_tokens is not None:
            raise InvalidRequestError(
                "sampling_params: give either sampling_params or single fields, not both",
                field="sampling_params",
            )
        request = GenerationRequest(
            request_id=request_id or new_request_id(),
            prompt_tokens=token_tuple(prompt_tokens),
            sampling_params=sampling_params,
            priority=priority,
            deadline_seconds=deadline_seconds,
        )
        return EventDicts(self.stream(request))

    def cancel(self, request_id: str) -> bool:
        """End a request in any state; False if none of that id is open."""
        return self._loop.cancel(request_id)

    def post(self, function: Callable[[], None]) -> bool:
        """Run ``function`` on the engine thread soon (Triton: the only thread that may send).

        Works on a dead engine, too; False (and not run) once the engine is closed.
        """
        return self._loop.post(function)

    def add_step_hook(self, hook: StepHook) -> None:
        """Call ``hook(report)`` on the engine thread after each iteration that ran a step or
        delivered events."""
        self._loop.add_step_hook(hook)

    def stats(self) -> EngineStats:
        """Counters and gauges: of this moment on the engine thread, else at most 0.1 s old."""
        return self._loop.stats()

    def health(self) -> HealthStatus:
        """Health now, without waiting for the engine thread."""
        return self._loop.health()

    @property
    def capabilities(self) -> BackendCapabilities:
        """What the engine can do with its backend."""
        return self._backend.capabilities

    @property
    def memory_info(self) -> MemoryInfo:
        """Sizes of the executor (vocabulary, context, blocks)."""
        return self._memory

    @property
    def max_model_len(self) -> int:
        """Tokens (prompt and output) that one request may have."""
        return self._max_model_len

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def stop_admitting(self, drain_seconds: float) -> None:
        """Refuse new requests from now on; those open end with an error after ``drain_seconds``.

        Never waits. A later call, also of ``close``, may shorten the time.
        """
        self._loop.ask_to_stop(drain_seconds)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let open ones run for ``drain_seconds``, fail the rest, release.

        Idempotent; joins the engine thread unless called on it.
        """
        self._finalizer.detach()
        self._loop.stop(drain_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class EventDicts(Iterator[dict[str, object]]):
    """``UnifiedEngine.generate``'s iterator: a ``TokenStream`` as dictionaries, one per token."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._ready: deque[dict[str, object]] = deque()

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    def __next__(self) -> dict[str, object]:
        while not self._ready:
            event = self._stream.get()
            if event.error is not None:
                raise event.error
            self._ready.extend(event_dicts(event))
        return self._ready.popleft()

    def close(self) -> None:
        """Cancel the request unless it has finished; no more events."""
        self._ready.clear()
        self._stream.close()


def event_dicts(event: TokenEvent) -> list[dict[str, object]]:
    """One event as ``token`` dictionaries (its text on the last of them) and perhaps ``finish``."""
    found: list[dict[str, object]] = [
        {"type": "token", "token_id": token, "text": ""} for token in event.token_ids
    ]
    for item, logprob in zip(found, event.logprobs, strict=False):
        item["logprob"] = logprob.logprob
        item["top_logprobs"] = dict(logprob.top)
    text = event.text
    if found:
        found[-1]["text"], text = text, ""
    if event.finish_reason is not None:
        found.append(
            {
                "type": "finish",
                "text": text,
                "finish_reason": event.finish_reason,
                "stop_reason": event.stop_reason,
                "usage": event.usage.as_dict() if event.usage else None,
                "timings": event.timings.as_dict() if event.timings else None,
            }
        )
    return found


def make_sampling_params(**fields: object) -> SamplingParams:
    """``SamplingParams(**fields)`` with an unknown name refused like any other bad input."""
    known = SamplingParams.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise UnsupportedFeatureError(name, "no such sampling parameter", field=name)
    return SamplingParams(**fields)  # type: ignore[arg-type]


def new_request_id() -> str:
    return f"req-{uuid.uuid4().hex}"
