"""The `generator` model: owns the engine, turns requests into streams of responses.

Threads:
    stub thread    ``execute``: reads tensors, validates, submits. It never sends.
    engine thread  everything that touches ``pb_utils`` once the engine runs: responses, errors,
                   ``is_cancelled``, metrics. Sending from two threads of a stub crashes the server.

Every response sender is ended exactly once, whatever happens (``response_stream.py``).
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
)
from pocket_backend.engine.tracing import RequestTracer
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.observability.logging import configure_logging, get_logger, log_event
from pocket_backend.triton import codec
from pocket_backend.triton.backlog import Backlog
from pocket_backend.triton.control import Control, parse_control
from pocket_backend.triton.feedback import FeedbackListener
from pocket_backend.triton.lifeline import LifelineListener
from pocket_backend.triton.metrics import MetricsBridge
from pocket_backend.triton.request import parse_parameters
from pocket_backend.triton.response_stream import ResponseStream, send_last
from pocket_backend.triton.responses import error_response, log_refusal
from pocket_backend.triton.settings import GeneratorSettings
from pocket_backend.triton.spans import spans_of, trace_context

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
        self.pb_utils = pb_utils
        self.final_flag = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._drain_seconds = settings.drain_seconds
        self._pacing = settings.pacing
        self._check_period = settings.cancellation_check_period_ms / 1000
        self._next_check = 0.0
        # Engine thread only, once it runs.
        self._streams: dict[str, ResponseStream] = {}
        self.metrics = MetricsBridge(pb_utils)
        spans = spans_of("generator")
        self._tracer = None if spans is None else RequestTracer(spans)
        self._engine = UnifiedEngine.from_args(settings.engine)
        tokenizer = self._engine.tokenizer
        self.token_bytes = None if tokenizer is None else tokenizer.token_bytes
        self._engine.add_step_hook(lambda _report: self._after_step())
        if self._tracer is not None:
            self._engine.add_step_hook(self._tracer.after_step)
        self.metrics.start(self._engine, Path(settings.engine.model).name)
        self.feedback = FeedbackListener(self._engine.cancel)
        self.backlog = Backlog(lambda: self.feedback.done)
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
        self.feedback.close()
        self.metrics.close()
        self._engine.close(self._drain_seconds)
        if self._tracer is not None:
            self._tracer.close()
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
        stream = ResponseStream(
            self, request, sender, parameters, int(prompt.size), errors_as_output
        )
        generation = GenerationRequest(
            request_id=stream.key,
            prompt_tokens=codec.token_ids_of("input_ids", prompt),
            sampling_params=parameters.sampling,
            priority=parameters.priority,
            deadline_seconds=parameters.deadline_seconds,
            cache_salt=parameters.cache_salt,
            metadata={"client_request_id": stream.client_id},
        )
        if self._tracer is not None:
            context = trace_context(request)
            stream.traced = self._tracer.start(stream.key, context, stream.client_id)
        # Registered on the engine thread before its first event, since commands keep their order.
        self._engine.post(lambda: self._register(stream))
        try:
            self._engine.submit(generation, stream)
        except BaseException as error:
            self._engine.post(lambda: self.forget(stream))
            if self._tracer is not None:
                self._tracer.refused(stream.key, error)
            raise

    def _refuse(self, sender: Any, error: Exception) -> None:
        def send() -> None:
            self.metrics.refused(error)
            send_last(sender, error_response(self.pb_utils, error), self.final_flag)

        self._on_engine_thread(send)

    def _on_engine_thread(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the one sending thread; on this one if that thread is no more."""
        if not self._engine.post(function):
            function()

    # --- engine thread ----------------------------------------------------------------------------

    def _register(self, stream: ResponseStream) -> None:
        if not stream.ended:
            self._streams[stream.key] = stream

    def forget(self, stream: ResponseStream) -> None:
        """The stream has ended."""
        self._streams.pop(stream.key, None)

    def chunk_interval(self) -> float:
        """Seconds between two chunks of one output, now."""
        return self._pacing.interval(len(self._streams))

    def cancel(self, stream: ResponseStream) -> None:
        """End what is left of the stream's request."""
        self._engine.cancel(stream.key)

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
        response = self.pb_utils.InferenceResponse(
            [codec.text(self.pb_utils, "control_result", json.dumps(result))]
        )
        send_last(sender, response, self.final_flag)

    def _after_step(self) -> None:
        now = time.monotonic()
        for stream in list(self._streams.values()):
            if stream.holds:
                stream.flush(now)
        if now >= self._next_check:
            self._next_check = now + self._check_period
            for key, stream in list(self._streams.items()):
                if stream.client_is_gone():
                    self._engine.cancel(key)
        if not self._streams:
            self.backlog.reset()
        self.metrics.after_step()
