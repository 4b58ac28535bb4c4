"""The objects and events of /v1/responses. An answer is one message with one part of text."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from pocket_client.gateway.errors import ApiError
from pocket_client.gateway.responses_schema import ResponsesRequest
from pocket_client.results import Chunk, Usage

_WHERE = {"output_index": 0, "content_index": 0}


def response_object(
    name: str,
    request: ResponsesRequest,
    *,
    created_at: int,
    status: str,
    text: str | None = None,
    usage: Usage | None = None,
    error: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """OpenAI's Response; without ``text``, one whose output has not begun."""
    output = [] if text is None else [message_item(name, text, status)]
    return {
        "id": name,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": request.model,
        "output": output,
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
        "metadata": {},
        "user": request.user,
        "usage": None if usage is None else _usage(usage),
    }


def message_item(name: str, text: str | None, status: str) -> dict[str, Any]:
    """The output message of response ``name``; without ``text``, one that has no content yet."""
    content = [] if text is None else [text_part(text)]
    return {
        "id": item_id(name),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item_id(name: str) -> str:
    return "msg" + name.removeprefix("resp")


def status_of(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


class ResponseEvents:
    """The events of one streamed response, numbered from 0."""

    def __init__(self, name: str, request: ResponsesRequest) -> None:
        self._name = name
        self._request = request
        self._created_at = int(time.time())
        self._number = 0
        self._started = False
        self._texts: list[str] = []
        self._usage = Usage()
        self._status = ""

    def chunk(self, prompt: int, chunk: Chunk) -> bytes:
        """The events of one chunk; the first ones come before it, the last ones after it."""
        del prompt  # there is one
        parts = [] if self._started else self._opening()
        self._usage = chunk.usage
        if chunk.text:
            self._texts.append(chunk.text)
            parts.append(self._text_event("delta", delta=chunk.text))
        if chunk.finish_reason is not None:
            self._status = status_of(chunk.finish_reason)
            parts += self._closing()
        return b"".join(parts)

    def end(self) -> bytes:
        """The last event, after which clients leave."""
        status = self._status
        return self._event(f"response.{status}", response=self._response(status, usage=self._usage))

    def error(self, problem: ApiError) -> bytes:
        """How a stream that has begun ends when it fails."""
        code = problem.code or "server_error"
        failed = {"code": "server_error", "message": problem.message}
        return self._event(
            "error", code=code, message=problem.message, param=problem.param
        ) + self._event("response.failed", response=self._response("failed", error=failed))

    def _opening(self) -> list[bytes]:
        self._started = True
        begun = self._response("in_progress", begun=False)
        item = message_item(self._name, None, "in_progress")
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=item),
            self._part_event("added", text_part("")),
        ]

    def _closing(self) -> list[bytes]:
        text = "".join(self._texts)
        item = message_item(self._name, text, self._status)
        return [
            self._text_event("done", text=text),
            self._part_event("done", text_part(text)),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _response(
        self,
        status: str,
        *,
        begun: bool = True,
        usage: Usage | None = None,
        error: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        return response_object(
            self._name,
            self._request,
            created_at=self._created_at,
            status=status,
            text="".join(self._texts) if begun else None,
            usage=usage,
            error=error,
        )

    def _text_event(self, kind: str, **fields: object) -> bytes:
        where = {"item_id": item_id(self._name), **_WHERE}
        return self._event(f"response.output_text.{kind}", **where, **fields, logprobs=[])

    def _part_event(self, kind: str, part: Mapping[str, object]) -> bytes:
        where = {"item_id": item_id(self._name), **_WHERE}
        return self._event(f"response.content_part.{kind}", **where, part=part)

    def _event(self, kind: str, **fields: object) -> bytes:
        body = json.dumps(
            {"type": kind, "sequence_number": self._number, **fields}, ensure_ascii=False
        )
        self._number += 1
        return f"event: {kind}\ndata: {body}\n\n".encode()
