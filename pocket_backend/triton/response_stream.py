"""One request's responses: the sink that the engine calls, and the sender that it feeds.

The sender is ended exactly once, whatever happens, and let go of then, or the model could never be
unloaded. Engine thread only, once made.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from pocket_backend.api import RequestCancelledError, TokenEvent
from pocket_backend.observability.logging import get_logger, log_event
from pocket_backend.triton.backlog import MAX_HOLD_SECONDS
from pocket_backend.triton.chunks import ChunkWriter, Increment, IncrementSum
from pocket_backend.triton.feedback import END_MARK
from pocket_backend.triton.request import Parameters
from pocket_backend.triton.responses import error_response, error_text

if TYPE_CHECKING:
    from pocket_backend.triton.generator import GeneratorModel

_log = get_logger("triton.generator")


class ResponseStream:
    """See the module. Outputs of a request with ``n`` above 1 share the sender: with ``stream``
    their increments come as they are made, each with its ``sequence_index``; without, one response
    has them all, since `generate` on a decoupled model allows exactly one."""

    def __init__(
        self,
        model: GeneratorModel,
        request: Any,
        sender: Any,
        parameters: Parameters,
        prompt_tokens: int,
        in_ensemble: bool,
    ) -> None:
        self.key = model.feedback.new_key()
        """The engine's request id, and what the detokenizer sends back when nobody reads."""
        self.client_id: str = request.request_id()
        self.ended = False
        self.cancel_reason = "disconnected"
        """What it means if the request ends as cancelled (``names.CANCEL_REASONS``)."""
        self.traced = False
        """Whether the detokenizer is told which response is the last, to end its span."""
        self._model = model
        self._sender = sender
        self._in_ensemble = in_ensemble
        self._held: dict[int, tuple[Increment, float]] = {}
        """By output: what waits for its time or for the detokenizer, and since when."""
        self._next_chunk: dict[int, float] = {}
        """By output: when the next chunk may go out (``pacing.py``). None yet: at once."""
        sampling = parameters.sampling
        self._writer = ChunkWriter(
            model.pb_utils,
            frozenset(request.requested_output_names()),
            self.key,
            prompt_tokens,
            sampling,
            timings=parameters.timings,
            token_bytes=model.token_bytes,
        )
        self._sums = None if parameters.stream else [IncrementSum() for _ in range(sampling.n)]

    def __call__(self, event: TokenEvent) -> None:
        """Send what ``event`` carries; the request's last event ends the sender.

        Raises whatever sending raises, after ending the sender: the engine then cancels the request
        and does not call again.
        """
        if self.ended:  # another output has failed, and the request with it
            return
        try:
            self._send(event)
        except Exception as error:
            self._end(self._error(error))
            raise
        finally:
            if self.ended:
                self._model.forget(self)
                self._model.metrics.finished(event, cancel_reason=self.cancel_reason)

    def _send(self, event: TokenEvent) -> None:
        if event.finish_reason in ("error", "cancelled"):
            self._end(self._error(event.error or RequestCancelledError("cancelled")))
            if not event.last:
                self._model.cancel(self)
            return
        increment = Increment.of(event)
        if self._sums is not None:
            self._sums[event.choice_index].add(increment)
            if event.last:
                wholes = [each.whole for each in self._sums if each.whole is not None]
                self._end(self._last_response(*wholes))
            return
        now = time.monotonic()
        held, since = self._held.pop(increment.sequence_index, (None, now))
        ready = increment if held is None else held.merge(increment)
        if event.last:
            self._end(self._last_response(ready))
        elif increment.finish_reason or self._may_go(ready, since, now):
            self._send_chunk(ready, now)
        else:
            self._held[increment.sequence_index] = (ready, since)

    def _may_go(self, increment: Increment, since: float, now: float) -> bool:
        """Whether what waits since ``since`` may go out before its output's end."""
        if not self._in_ensemble:
            return True
        if now < self._next_chunk.get(increment.sequence_index, 0.0):
            return False
        return not self._model.backlog.full() or now - since >= MAX_HOLD_SECONDS

    def _send_chunk(self, increment: Increment, now: float) -> None:
        if self._in_ensemble:
            self._next_chunk[increment.sequence_index] = now + self._model.chunk_interval()
        self._sender.send(self._writer.response(increment))
        self._count()

    @property
    def holds(self) -> bool:
        """Whether something waits to be sent: then ``flush`` has to be called now and then."""
        return bool(self._held)

    def flush(self, now: float) -> None:
        """Send what has waited long enough; the output may not have made a token since.

        A stream that cannot be sent to has its request cancelled, which ends it.
        """
        for index, (increment, since) in list(self._held.items()):
            if not self.ended and self._may_go(increment, since, now):
                del self._held[index]
                try:
                    self._send_chunk(increment, now)
                except Exception as error:  # noqa: BLE001  (pybind raises several kinds)
                    log_event(_log, logging.WARNING, "chunk not sent", reason=str(error))
                    self._model.cancel(self)

    def _error(self, error: BaseException) -> Any:
        """The last response of a failed request (responses.py says why there are two forms)."""
        if self._in_ensemble:
            text = error_text(error, key=self.key, client_id=self.client_id)
            return self._last_response(Increment((), (), (0, 0), error=text))
        pb_utils = self._model.pb_utils
        return error_response(pb_utils, error, key=self.key, client_id=self.client_id)

    def _last_response(self, *increments: Increment) -> Any:
        if self.traced:
            self._writer.replace_key(self.key + END_MARK)
        return self._writer.response(*increments)

    def client_is_gone(self) -> bool:
        return self._sender is not None and bool(self._sender.is_cancelled())

    def _end(self, response: Any) -> None:
        """Send the last response and let go of the sender; once."""
        if self.ended:
            return
        self.ended = True
        sender, self._sender = self._sender, None
        send_last(sender, response, self._model.final_flag)
        self._count()

    def _count(self) -> None:
        if self._in_ensemble:
            self._model.backlog.sent()


def send_last(sender: Any, response: Any, final: int) -> None:
    """End a sender; if the response cannot be sent, end it with the bare flag."""
    try:
        sender.send(response, flags=final)
    except Exception as error:  # noqa: BLE001  (pybind raises several kinds; the client may be gone)
        log_event(_log, logging.WARNING, "final response not sent", reason=str(error))
        try:
            sender.send(flags=final)
        except Exception as second:  # noqa: BLE001
            log_event(_log, logging.WARNING, "stream not ended", reason=str(second))
