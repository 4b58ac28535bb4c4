"""The JSON that goes back. Events are text templates: each costs one dump of a string."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from pocket_client.gateway.translate import Generation
from pocket_client.results import Chunk, Completion, Usage

_OBJECTS = {"chat": "chat.completion", "completion": "text_completion"}
_CHUNK_OBJECTS = {"chat": "chat.completion.chunk", "completion": "text_completion"}
DONE = b"data: [DONE]\n\n"


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


def usage_of(generation: Generation, usages: Sequence[Usage]) -> dict[str, object]:
    """Of all choices; a prompt counts once. ``usages`` by choice."""
    prompts: dict[int, Usage] = {}
    for prompt, usage in zip(generation.prompt_of_choice, usages, strict=True):
        prompts.setdefault(prompt, usage)
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts.values())
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in prompts.values())
        },
    }


def answer(generation: Generation, model: str, completions: Sequence[Completion]) -> bytes:
    """The body of a request without ``stream``."""
    body = {
        "id": generation.id,
        "object": _OBJECTS[generation.kind],
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(generation, i, c) for i, c in enumerate(completions)],
        "usage": usage_of(generation, [completion.usage for completion in completions]),
    }
    return json.dumps(body, ensure_ascii=False).encode()


def _choice(generation: Generation, index: int, completion: Completion) -> Mapping[str, object]:
    common = {
        "index": index,
        "logprobs": None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if generation.kind == "chat":
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {**common, "message": message}
    echo = generation.echo[index] if generation.echo else ""
    return {**common, "text": echo + completion.text}


class EventWriter:
    """The events of one stream. Usage is in none of them, or null in all but the last one."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation = generation
        self._chat = generation.kind == "chat"
        self._started = [False] * len(generation.requests)
        self._usages = [Usage()] * len(generation.requests)
        head = json.dumps(
            {
                "id": generation.id,
                "object": _CHUNK_OBJECTS[generation.kind],
                "created": int(time.time()),
                "model": model,
            }
        )
        self._head = f"data: {head[:-1]}, "
        self._tail = ', "usage": null}\n\n' if generation.include_usage else "}\n\n"

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """The events of one chunk of choice ``index``; may be empty."""
        self._usages[index] = chunk.usage
        parts = []
        text = chunk.text
        if not self._started[index]:
            self._started[index] = True
            if self._chat:
                parts.append(self._event(index, '"delta": {"role": "assistant", "content": ""}'))
            elif self._generation.echo:
                text = self._generation.echo[index] + text
        if self._chat:
            if text:
                parts.append(self._event(index, f'"delta": {{"content": {_string(text)}}}'))
            if chunk.finish_reason is not None:
                parts.append(self._event(index, '"delta": {}', chunk))
        elif text or chunk.finish_reason is not None:
            parts.append(self._event(index, f'"text": {_string(text)}', chunk))
        return "".join(parts).encode()

    def end(self) -> bytes:
        """What follows the last chunk of the last choice."""
        if not self._generation.include_usage:
            return DONE
        usage = json.dumps(usage_of(self._generation, self._usages))
        return f'{self._head}"choices": [], "usage": {usage}}}\n\n'.encode() + DONE

    def _event(self, index: int, content: str, chunk: Chunk | None = None) -> str:
        if chunk is None or chunk.finish_reason is None:
            ending = '"finish_reason": null'
        else:
            reason = json.dumps(chunk.stop_reason, ensure_ascii=False)
            ending = f'"finish_reason": "{chunk.finish_reason}", "stop_reason": {reason}'
        return (
            f'{self._head}"choices": [{{"index": {index}, {content}, "logprobs": null, {ending}}}]'
            f"{self._tail}"
        )


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
