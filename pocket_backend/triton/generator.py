"""The `generator` model: owns the engine, turns requests into streams of responses.

Threads:
    stub thread    ``execute``: reads tensors, validates, submits. It never sends.
    engine thread  everything that touches ``pb_utils`` once the engine runs: responses, errors,
                   ``is_cancelled``, metrics. Sending from two threads of a stub crashes the server.

Every response sender is ended exactly once, whatever happens; ``_Stream`` owns that rule and drops
its references to the sender then, or the model could never be unloaded.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pocket_backend.api import (
    GenerationRequest,
    InvalidRequestError,
    PocketLLMError,
    RequestCancelledError,
    TokenEvent,
)
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.observability.logging import configure_logging, get_logger, log_event
from pocket_backend.triton import codec
from pocket_backend.triton.backlog import MAX_HOLD_SECONDS, Backlog
from pocket_backend.triton.chunks import ChunkWriter, Increment, IncrementSum
from pocket_backend.triton.control import Control, parse_control
from pocket_backend.triton.feedback import FeedbackListener
from pocket_backend.triton.lifeline import LifelineListener
from pocket_backend.triton.metrics import MetricsBridge
from pocket_backend.triton.request import Parameters, parse_parameters
from pocket_backend.triton.responses import error_response, error_text, log_refusal
from pocket_backend.triton.settings import GeneratorSettings

_log = get_logger("triton.generator")


class GeneratorModel:
    """Runtime behind ``model_repository/generator``."""

    def __init__(self, pb_utils: Any, args: dict[str, str]) -> None:
        """Load the model and start the engine.

        Raises:
            PocketLLMError: one sentence about what is missing or wrong.
        """
        configure_logging()
        codec.self_test(pb_utils)
        settings = GeneratorSettings.from_model_config(args["model_config"])
        self._pb = pb_utils
        self._final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._drain_seconds = settings.drain_seconds
        self._check_period = settings.cancellation_check_period_ms / 1000
        self._next_check = 0.0
        # Engine thread only, once it runs.
        self._streams: dict[str, _Stream] = {}
        self._metrics = MetricsBridge(pb_utils)
        self._engine = UnifiedEngine.from_args(settings.engine)
        self._engine.add_step_hook(lambda _report: self._after_step())
        self._metrics.start(self._engine, Path(settings.engine.model).name)
        self._feedback = FeedbackListener(self._engine.cancel)
        self._backlog = Backlog(lambda: self._feedback.done)
        self._lifeline = LifelineListener.from_environment(self._engine, os.environ)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except PocketLLMError as error:
                log_refusal(_log, request, error)
                self._refuse(sender, error)
            except Exception as error:  # noqa: BLE001  (T1: an exception must not leave a sender open)
                log_event(_log, logging.ERROR, "request failed on arrival", exc_info=error,
                          client_request_id=request.request_id() or None)  # fmt: skip
                self._refuse(sender, error)

    def close(self) -> None:
        """Let open streams finish for a while, fail the rest, release the model."""
        if self._lifeline is not None:
            self._lifeline.close()
        self._feedback.close()
        self._metrics.close()
        self._engine.close(self._drain_seconds)
        self._streams.clear()

    # --- stub thread ------------------------------------------------------------------------------

    def _accept(self, request: Any, sender: Any) -> None:
        values = codec.read_inputs(request)
        if "control" in values:
            control = parse_control(values["control"])
            self._on_engine_thread(lambda: self._control(control, sender))
            return
        prompt = codec.first_input(request, "input_ids")
        if prompt is None:
            raise InvalidRequestError("input_ids: missing; the generator takes a prompt of ids")
        del values["input_ids"]
        errors_as_output = values.pop("errors_as_output", False) is True
        parameters = parse_parameters(values, codec.read_parameters(request))
        stream = _Stream(self, request, sender, parameters, int(prompt.size), errors_as_output)
        generation = GenerationRequest(
            request_id=stream.key,
            prompt_tokens=codec.token_ids_of("input_ids", prompt),
            sampling_params=parameters.sampling,
            priority=parameters.priority,
            deadline_seconds=parameters.deadline_seconds,
            cache_salt=parameters.cache_salt,
            metadata={"client_request_id": stream.client_id},
        )
        # Registered on the engine thread before its first event, since commands keep their order.
        self._engine.post(lambda: self._register(stream))
        try:
            self._engine.submit(generation, stream)
        except BaseException:
            self._engine.post(lambda: self._forget(stream))
            raise

    def _refuse(self, sender: Any, error: Exception) -> None:
        def send() -> None:
            self._metrics.refused(error)
            _send_safely(sender, error_response(self._pb, error), self._final)

        self._on_engine_thread(send)

    def _on_engine_thread(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the one sending thread; on this one if that thread is no more."""
        if not self._engine.post(function):
            function()

    # --- engine thread ----------------------------------------------------------------------------

    def _register(self, stream: _Stream) -> None:
        if not stream.ended:
            self._streams[stream.key] = stream

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.key, None)

    def _control(self, control: Control, sender: Any) -> None:
        result: dict[str, object]
        if control.stats:
            result = {
                **self._engine.stats().as_dict(),
                "open_streams": len(self._streams),
                "health": self._engine.health().as_dict(),
            }
        else:
            streams = [
                stream
                for stream in self._streams.values()
                if stream.client_id == control.cancel_request_id
            ]
            for stream in streams:
                stream.cancel_reason = "asked"
            result = {"cancelled": sum(self._engine.cancel(stream.key) for stream in streams)}
        response = self._pb.InferenceResponse(
            [codec.text(self._pb, "control_result", json.dumps(result))]
        )
        _send_safely(sender, response, self._final)

    def _after_step(self) -> None:
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + self._check_period
            for key, stream in list(self._streams.items()):
                if stream.client_is_gone():
                    self._engine.cancel(key)
        if not self._streams:
            self._backlog.reset()
        self._metrics.after_step()


class _Stream:
    """One request's responses: the sink that the engine calls, and the sender it feeds."""

    def __init__(
        self,
        model: GeneratorModel,
        request: Any,
        sender: Any,
        parameters: Parameters,
        prompt_tokens: int,
        in_ensemble: bool,
    ) -> None:
        self.key = model._feedback.new_key()
        """The engine's request id, and what the detokenizer sends back when nobody reads."""
        self.client_id: str = request.request_id()
        self.ended = False
        self.cancel_reason = "disconnected"
        """What it means if the request ends as cancelled (``names.CANCEL_REASONS``)."""
        self._model = model
        self._sender = sender
        self._in_ensemble = in_ensemble
        self._held: Increment | None = None
        self._held_since = 0.0
        self._writer = ChunkWriter(
            model._pb,
            frozenset(request.requested_output_names()),
            self.key,
            prompt_tokens,
            parameters.sampling.skip_special_tokens,
        )
        # stream=false: `generate` on a decoupled model allows exactly one response.
        self._sum = None if parameters.stream else IncrementSum()

    def __call__(self, event: TokenEvent) -> None:
        """Send what ``event`` carries; the last event ends the sender.

        Raises whatever sending raises, after ending the sender: the engine then cancels the request
        and does not call again.
        """
        try:
            self._send(event)
        except Exception as error:
            self._end(self._error(error))
            raise
        finally:
            if self.ended:
                self._model._forget(self)
                self._model._metrics.finished(event, cancel_reason=self.cancel_reason)

    def _send(self, event: TokenEvent) -> None:
        last = event.finish_reason is not None
        if event.finish_reason in ("error", "cancelled"):
            self._end(self._error(event.error or RequestCancelledError("cancelled")))
            return
        increment = Increment.of(event)
        if self._sum is not None:
            increment = self._sum.add(increment)
            if not last:
                return
        elif self._hold(increment, last):
            return
        else:
            increment, self._held = self._held or increment, None
        response = self._writer.response(increment)
        if last:
            self._end(response)
        else:
            self._sender.send(response)
            self._count()

    def _hold(self, increment: Increment, last: bool) -> bool:
        """Add to what is held; whether to go on holding it, since the detokenizer is behind."""
        if self._held is None:
            if last or not self._in_ensemble or not self._model._backlog.full():
                return False
            self._held, self._held_since = increment, time.monotonic()
            return True
        self._held = self._held.merge(increment)
        if last or not self._model._backlog.full():
            return False
        return time.monotonic() - self._held_since < MAX_HOLD_SECONDS

    def _error(self, error: BaseException) -> Any:
        """The last response of a failed request (responses.py says why there are two forms)."""
        if self._in_ensemble:
            text = error_text(error, key=self.key, client_id=self.client_id)
            return self._writer.response(Increment((), (), (0, 0), error=text))
        return error_response(self._model._pb, error, key=self.key, client_id=self.client_id)

    def client_is_gone(self) -> bool:
        return self._sender is not None and bool(self._sender.is_cancelled())

    def _end(self, response: Any) -> None:
        """Send the last response (None: only the final flag) and let go of the sender; once."""
        if self.ended:
            return
        self.ended = True
        sender, self._sender = self._sender, None
        _send_safely(sender, response, self._model._final)
        self._count()

    def _count(self) -> None:
        if self._in_ensemble:
            self._model._backlog.sent()


def _send_safely(sender: Any, response: Any, final: int) -> None:
    """End a sender; if the response cannot be sent, end it with the bare flag."""
    try:
        if response is None:
            sender.send(flags=final)
        else:
            sender.send(response, flags=final)
    except Exception as error:  # noqa: BLE001  (pybind raises several kinds; the client may be gone)
        log_event(_log, logging.WARNING, "final response not sent", reason=str(error))
        try:
            sender.send(flags=final)
        except Exception as second:  # noqa: BLE001
            log_event(_log, logging.WARNING, "stream not ended", reason=str(second))
