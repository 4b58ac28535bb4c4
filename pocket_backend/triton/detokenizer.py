"""The `detokenizer` model: the ids of one chunk to its text, without state but for spans.

It has a second job. Triton does not tell a running decoupled step of an ensemble that the client is
gone, but marks the *next* request of the following step as cancelled: that is how a request reaches
this model with ``is_cancelled()`` true. It then tells the generator (``feedback.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from pocket_backend.api import InvalidRequestError, PocketLLMError
from pocket_backend.observability.logging import configure_logging, get_logger, log_event
from pocket_backend.text import chunk_texts
from pocket_backend.triton import codec
from pocket_backend.triton.feedback import END_MARK, FeedbackSender
from pocket_backend.triton.responses import error_response, response_of_text
from pocket_backend.triton.settings import engine_args, environment_of, model_tokenizer
from pocket_backend.triton.spans import DetokenizeSpans, spans_of, trace_context

_log = get_logger("triton.detokenizer")


class DetokenizerModel:
    """Runtime behind ``model_repository/detokenizer``."""

    def __init__(self, pb_utils: Any, args: dict[str, str]) -> None:
        configure_logging()
        self._pb = pb_utils
        arguments = engine_args(environment_of(args["model_config"]))
        self._token_bytes = model_tokenizer(arguments).token_bytes
        self._feedback = FeedbackSender()
        spans = spans_of("detokenizer")
        self._spans = None if spans is None else DetokenizeSpans(spans)

    def execute(self, requests: list[Any]) -> list[Any]:
        if self._spans is None:
            return [self._answer(request) for request in requests]
        return [self._traced_answer(request, self._spans) for request in requests]

    def close(self) -> None:
        """Let go of the socket, and export the spans that are left."""
        self._feedback.close()
        if self._spans is not None:
            self._spans.close()

    def _traced_answer(self, request: Any, spans: DetokenizeSpans) -> Any:
        began = spans.begin()
        response = self._answer(request)
        try:
            tensors = codec.inputs_by_name(request)
            key = _stream_key(tensors) if "stream_key" in tensors else ""
            ids = codec.token_ids_of("token_ids", tensors["token_ids"])
        except (PocketLLMError, KeyError):  # malformed, and answered with an error already
            return response
        spans.chunk(
            key.removesuffix(END_MARK),
            trace_context(request),
            began,
            len(ids),
            last=not key or key.endswith(END_MARK),
        )
        return response

    def _answer(self, request: Any) -> Any:
        try:
            tensors = codec.inputs_by_name(request)
            if "stream_key" in tensors:
                key = _stream_key(tensors).removesuffix(END_MARK)
                self._feedback.chunk_done(key)
                if request.is_cancelled():
                    self._feedback.abandoned(key)
            failure = codec.value_of("error", tensors["error"]) if "error" in tensors else ""
            if failure:
                return response_of_text(self._pb, str(failure))
            return self._pb.InferenceResponse(
                [codec.texts(self._pb, "text_output", self._texts(tensors))]
            )
        except PocketLLMError as error:
            return error_response(self._pb, error)
        except Exception as error:  # noqa: BLE001  (one request must not fail its batch)
            log_event(_log, logging.ERROR, "detokenizing failed", exc_info=error)
            return error_response(self._pb, error)

    def _texts(self, tensors: Any) -> list[str]:
        bounds = codec.token_ids_of("text_range", tensors["text_range"])
        if not bounds or len(bounds) % 2:
            raise InvalidRequestError.of(
                "text_range", bounds, "must be [begin, end], or several such pairs"
            )
        skip = tensors.get("skip_special_tokens")
        return chunk_texts(
            codec.token_ids_of("context_ids", tensors["context_ids"]),
            codec.token_ids_of("token_ids", tensors["token_ids"]),
            list(zip(bounds[::2], bounds[1::2], strict=True)),
            self._token_bytes,
            True if skip is None else bool(np.all(skip)),
        )


def _stream_key(tensors: Mapping[str, Any]) -> str:
    return str(codec.value_of("stream_key", tensors["stream_key"]))
