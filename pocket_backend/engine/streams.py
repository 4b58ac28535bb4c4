"""Where the events of one request go: sinks, the thread-safe stream, and the collector.

A *sink* is any callable ``sink(event: TokenEvent) -> None``. The engine thread calls it, in order,
with exactly one last event (``event.last``). A sink must return quickly: it runs between two
steps of everybody's requests. A sink that raises has lost its client: its request is cancelled and
it is not called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Self

from pocket_backend.api import GenerationResult, RequestCancelledError, TokenEvent

if TYPE_CHECKING:
    from pocket_backend.api import TokenLogprob

EventSink = Callable[[TokenEvent], None]


class TokenStream(Iterator[TokenEvent]):
    """The events of one request for a consumer on another thread.

    The engine never waits for a consumer, and what a slow one leaves unread is bounded by the
    request's own ``max_tokens`` (at most one event per token), so the queue needs no limit.

    Iterating ends after the last event. ``close()``, leaving the ``with`` block, or dropping the
    stream cancels a request that is still open. One consumer thread; ``cancel`` and ``close`` from
    any thread.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], bool]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._events: SimpleQueue[TokenEvent] = SimpleQueue()
        # Not a method of this object: the engine must not keep a dropped stream alive.
        self.sink: EventSink = self._events.put
        self._finished = False

    def detach(self) -> None:
        """The request was never admitted: nothing to read or cancel."""
        self._finished = True

    def get(self, timeout: float | None = None) -> TokenEvent:
        """The next event.

        Raises:
            TimeoutError: nothing came within ``timeout`` seconds (the request goes on).
            StopIteration: the last event was already taken.
        """
        if self._finished:
            raise StopIteration
        try:
            event = self._events.get(timeout=timeout)
        except Empty:
            raise TimeoutError(
                f"request {self.request_id!r}: no event within {timeout} seconds"
            ) from None
        self._finished = event.last
        return event

    def __next__(self) -> TokenEvent:
        return self.get()

    def cancel(self) -> bool:
        """Ask the engine to end the request; its last event still comes."""
        return self._cancel(self.request_id)

    def close(self) -> None:
        """Stop reading; cancels the request unless its last event was read."""
        if not self._finished:
            self._finished = True
            self._cancel(self.request_id)

    def __del__(self) -> None:
        if not getattr(self, "_finished", True):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ResultCollector:
    """A sink that adds up a request's events, one ``GenerationResult`` per choice.

    ``on_finish`` is called on the engine thread with the collector after the last event.
    """

    def __init__(self, on_finish: Callable[[ResultCollector], None] | None = None) -> None:
        self._on_finish = on_finish
        self._choices: dict[int, _Choice] = {}
        self._finished = False

    def __call__(self, event: TokenEvent) -> None:
        choice = self._choices.get(event.choice_index)
        if choice is None:
            choice = self._choices[event.choice_index] = _Choice()
        choice.token_ids.extend(event.token_ids)
        choice.texts.append(event.text)
        choice.logprobs.extend(event.logprobs)
        choice.prompt_logprobs += event.prompt_logprobs
        if event.finish_reason is not None:
            choice.last = event
        if event.last:
            self._finished = True
            if self._on_finish is not None:
                self._on_finish(self)

    @property
    def finished(self) -> bool:
        return self._finished

    def results(self) -> list[GenerationResult]:
        """The finished choices in order.

        Raises:
            PocketLLMError: the error of a choice that ended with one.
            RequestCancelledError: not finished yet.
        """
        if not self._finished:
            raise RequestCancelledError("the request has not finished")
        return [choice.result() for _, choice in sorted(self._choices.items())]


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    last: TokenEvent | None = None

    def result(self) -> GenerationResult:
        last = self.last
        assert last is not None
        if last.error is not None:
            raise last.error
        assert last.finish_reason is not None
        assert last.usage is not None
        assert last.timings is not None
        return GenerationResult(
            request_id=last.request_id,
            token_ids=tuple(self.token_ids),
            text="".join(self.texts),
            finish_reason=last.finish_reason,
            usage=last.usage,
            timings=last.timings,
            stop_reason=last.stop_reason,
            logprobs=tuple(self.logprobs),
            choice_index=last.choice_index,
            prompt_logprobs=self.prompt_logprobs,
        )
