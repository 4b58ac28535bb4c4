"""The `tokenizer` model: text or messages and every parameter in, ids and one JSON out.

Each request is answered by itself: a bad one gets its error, the others of the batch go on.
"""

from __future__ import annotations

import logging
from typing import Any

from pocket_backend.api import InvalidRequestError, PocketLLMError
from pocket_backend.observability.logging import configure_logging, get_logger, log_event
from pocket_backend.text import Tokenizer
from pocket_backend.triton import codec
from pocket_backend.triton.metrics import RefusalCounter
from pocket_backend.triton.request import Prompt, parse_request
from pocket_backend.triton.responses import error_response, log_refusal
from pocket_backend.triton.settings import engine_args, environment_of, model_tokenizer

_log = get_logger("triton.tokenizer")


class TokenizerModel:
    """Runtime behind ``model_repository/tokenizer``. Stateless; calls come from one stub thread."""

    def __init__(self, pb_utils: Any, args: dict[str, str]) -> None:
        configure_logging()
        codec.self_test(pb_utils)
        self._pb = pb_utils
        self._refusals = RefusalCounter(pb_utils)
        self._tokenizer = model_tokenizer(engine_args(environment_of(args["model_config"])))

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            prompt, parameters = parse_request(
                codec.read_inputs(request),
                codec.read_parameters(request),
                vocab_size=self._tokenizer.vocab_size,
            )
            ids = encode_prompt(self._tokenizer, prompt)
            return self._pb.InferenceResponse(
                [
                    codec.int32(self._pb, "input_ids", ids),
                    codec.text(self._pb, "sampling_parameters", parameters.to_json()),
                    codec.boolean(self._pb, "errors_as_output", True),
                ]
            )
        except PocketLLMError as error:
            self._refusals.refused(error)
            log_refusal(_log, request, error)
            return error_response(self._pb, error)
        except Exception as error:  # noqa: BLE001  (one request must not fail its batch)
            self._refusals.refused(error)
            log_event(_log, logging.ERROR, "tokenizing failed", exc_info=error,
                      client_request_id=request.request_id() or None)  # fmt: skip
            return error_response(self._pb, error)


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> list[int] | tuple[int, ...]:
    """Ids of whichever form of prompt was sent.

    Raises:
        InvalidRequestError: bad messages, or nothing to continue.
    """
    if prompt.token_ids is not None:
        return prompt.token_ids
    if prompt.messages is not None:
        ids = tokenizer.apply_chat_template(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            tools=prompt.tools,
            template_kwargs=prompt.template_kwargs,
        )
    else:
        assert prompt.text is not None
        ids = tokenizer.encode(prompt.text)
    if not ids:
        field = "messages" if prompt.messages is not None else "text_input"
        raise InvalidRequestError(f"{field}: gives an empty prompt", field=field)
    return ids
