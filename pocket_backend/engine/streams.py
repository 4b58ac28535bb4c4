"""Where the events of one request go: sinks, the thread-safe stream, and the collector.

A *sink* is any callable ``sink(event: TokenEvent) -> None``. The engine thread calls it, in order,
with exactly one last event (``finish_reason`` set). A sink must return quickly: it runs between two
steps of everybody's requests. A sink that raises has lost its client: its request is cancelled and
it is not called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from pocket_backend.api import GenerationResult, RequestCancelledError, TokenEvent

if TYPE_CHECKING:
    from pocket_backend.api import TokenLogprob

EventSink = Callable[[TokenEvent], None]


class TokenStream(Iterator[TokenEvent]):
    """The events of one request for a consumer on another thread.

    The engine never waits for a consumer, and what a slow one leaves unread is bounded by the
    request's own ``max_tokens`` (at most one event per token), so the queue needs no limit.

    Iterating ends after the last event. ``close()`` (or leaving the ``with`` block) cancels a
    request that is still open. One consumer thread; ``cancel`` and ``close`` from any thread.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], bool]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._events: SimpleQueue[TokenEvent] = SimpleQueue()
        self._finished = False

    def __call__(self, event: TokenEvent) -> None:
        """The sink side (engine thread)."""
        self._events.put(event)

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
        self._finished = event.finish_reason is not None
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

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ResultCollector:
    """A sink that adds up a request's events into one ``GenerationResult``.

    ``on_finish`` is called on the engine thread with the collector after the last event.
    """

    def __init__(self, on_finish: Callable[[ResultCollector], None] | None = None) -> None:
        self._on_finish = on_finish
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: TokenEvent | None = None

    def __call__(self, event: TokenEvent) -> None:
        self._token_ids.extend(event.token_ids)
        self._texts.append(event.text)
        self._logprobs.extend(event.logprobs)
        if event.finish_reason is not None:
            self._last = event
            if self._on_finish is not None:
                self._on_finish(self)

    @property
    def finished(self) -> bool:
        return self._last is not None

    def result(self) -> GenerationResult:
        """The finished result.

        Raises:
            PocketLLMError: the request's own error, if it ended with one.
            RequestCancelledError: not finished yet.
        """
        last = self._last
        if last is None:
            raise RequestCancelledError("the request has not finished")
        if last.error is not None:
            raise last.error
        assert last.finish_reason is not None
        assert last.usage is not None
        assert last.timings is not None
        return GenerationResult(
            request_id=last.request_id,
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            finish_reason=last.finish_reason,
            usage=last.usage,
            timings=last.timings,
            stop_reason=last.stop_reason,
            logprobs=tuple(self._logprobs),
        )
