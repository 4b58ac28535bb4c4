"""POST /v1/responses: text in, text out, with OpenAI's typed events when it streams.

A response is answered like a chat completion of one choice; only its objects differ. Nothing is
stored, so a conversation is sent whole each time.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence

from pocket_client.gateway.auth import Tenant
from pocket_client.gateway.errors import ApiError
from pocket_client.gateway.generation import ChunkWriter, GenerationResponse
from pocket_client.gateway.responses_render import ResponseEvents, response_object, status_of
from pocket_client.gateway.responses_schema import ResponsesRequest
from pocket_client.gateway.schema import ChatRequest
from pocket_client.gateway.service import Service
from pocket_client.gateway.translate import Generation, chat_generation
from pocket_client.options import new_request_id
from pocket_client.results import Completion

_SAME_NAME = ("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty", "ignore_eos")
_FIELD_NAMES = {"prompt": "input", "text_input": "input", "max_tokens": "max_output_tokens"}


class ResponsesResponse(GenerationResponse):
    """Answers with a Response object, or with its events."""

    def __init__(self, service: Service, request: ResponsesRequest, generation: Generation,
                 tenant: Tenant) -> None:  # fmt: skip
        super().__init__(service, generation, tenant)
        self._request = request
        self._events = ResponseEvents(generation.id, request)

    def whole(self, completions: Sequence[Completion]) -> bytes:
        [completion] = completions
        body = response_object(
            self._generation.id,
            self._request,
            created_at=int(time.time()),
            status=status_of(completion.finish_reason),
            text=completion.text,
            usage=completion.usage,
        )
        return json.dumps(body, ensure_ascii=False).encode()

    def writer(self) -> ChunkWriter:
        return self._events

    def error_events(self, problem: ApiError) -> bytes:
        return self._events.error(problem)


def responses_generation(
    body: ResponsesRequest, tenant: Tenant, headers: Mapping[str, str]
) -> Generation:
    """Raises ApiError for what cannot be sent."""
    values = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    chat = ChatRequest(
        model=body.model,
        messages=body.messages(),
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream,
        **values,
    )
    generation = chat_generation(chat, tenant, headers, max_choices=1)
    names = {**generation.field_names, **_FIELD_NAMES, "messages": "input"}
    return dataclasses.replace(generation, id=new_request_id("resp"), field_names=names)
