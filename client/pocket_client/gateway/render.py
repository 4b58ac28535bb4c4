"""The JSON that goes back. Events are text templates: each costs one dump of a string."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from pocket_client.gateway.openai_logprobs import TextLogprobs, chat_logprobs, echoed_first_token
from pocket_client.gateway.translate import Generation
from pocket_client.gateway.usage import UsageSum
from pocket_client.results import Chunk, Completion, Output, Usage

_OBJECTS = {"chat": "chat.completion", "completion": "text_completion"}
_CHUNK_OBJECTS = {"chat": "chat.completion.chunk", "completion": "text_completion"}
DONE = b"data: [DONE]\n\n"


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


def usage_of(usages: Sequence[Usage]) -> dict[str, object]:
    """The sum of all prompts' usages, each of which counts its prompt once."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def answer(generation: Generation, model: str, completions: Sequence[Completion]) -> bytes:
    """The body of a request without ``stream``; one completion of each prompt."""
    body = {
        "id": generation.id,
        "object": _OBJECTS[generation.kind],
        "created": int(time.time()),
        "model": model,
        "choices": [
            _choice(generation, prompt, completion, output)
            for prompt, completion in enumerate(completions)
            for output in completion.outputs
        ],
        "usage": usage_of([completion.usage for completion in completions]),
    }
    return json.dumps(body, ensure_ascii=False).encode()


def _choice(
    generation: Generation, prompt: int, completion: Completion, output: Output
) -> Mapping[str, object]:
    common: dict[str, object] = {
        "index": prompt * generation.n + output.index,
        "logprobs": None,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    wanted = generation.alternatives
    if generation.kind == "chat":
        message = {"role": "assistant", "content": output.text, "refusal": None}
        if wanted is not None:
            common["logprobs"] = chat_logprobs(output.logprobs, wanted)
        return {**common, "message": message}
    echo = generation.echo[prompt] if generation.echo else ""
    if wanted is not None:
        before = completion.prompt_logprobs
        common["logprobs"] = TextLogprobs().take(
            (*before, *output.logprobs), wanted, echoed_first_token(echo, before)
        )
    return {**common, "text": echo + output.text}


class EventWriter:
    """The events of one stream. Usage is in none of them, or null in all but the last one."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation = generation
        self._chat = generation.kind == "chat"
        self._started = [False] * generation.choices
        self._used = UsageSum()
        self._offsets = [TextLogprobs() for _ in range(generation.choices)]
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

    def chunk(self, prompt: int, chunk: Chunk) -> bytes:
        """The events of one chunk of a prompt's stream; may be empty."""
        index = prompt * self._generation.n + chunk.index
        self._used.add(prompt, chunk)
        first = not self._started[index]
        self._started[index] = True
        return (self._of_chat if self._chat else self._of_text)(index, prompt, chunk, first)

    def _of_chat(self, index: int, _prompt: int, chunk: Chunk, first: bool) -> bytes:
        parts = []
        if first:
            parts.append(self._event(index, '"delta": {"role": "assistant", "content": ""}'))
        logprobs = "null"
        if self._generation.alternatives is not None and chunk.logprobs:
            logprobs = _json(chat_logprobs(chunk.logprobs, self._generation.alternatives))
        if chunk.text or logprobs != "null":  # tokens without text have their entries, too
            content = f'"delta": {{"content": {_json(chunk.text)}}}'
            parts.append(self._event(index, content, logprobs=logprobs))
        if chunk.finish_reason is not None:
            parts.append(self._event(index, '"delta": {}', chunk))
        return "".join(parts).encode()

    def _of_text(self, index: int, prompt: int, chunk: Chunk, first: bool) -> bytes:
        generation = self._generation
        echo = generation.echo[prompt] if first and generation.echo else ""
        text = echo + chunk.text
        logprobs = "null"
        if generation.alternatives is not None:
            # With echo, a prompt's entries come with the first chunk of its first output; the other
            # outputs' streams leave them out.
            before = chunk.prompt_logprobs
            items = (*before, *chunk.logprobs)
            if first and echo and not before:
                self._offsets[index].offset = len(echo)
            if items:
                taken = self._offsets[index].take(
                    items, generation.alternatives, echoed_first_token(echo, before)
                )
                logprobs = _json(taken)
        if not text and chunk.finish_reason is None and logprobs == "null":
            return b""
        return self._event(index, f'"text": {_json(text)}', chunk, logprobs).encode()

    def end(self) -> bytes:
        """What follows the last chunk of the last choice."""
        if not self._generation.include_usage:
            return DONE
        usage = json.dumps(usage_of(self._used.by_prompt()))
        return f'{self._head}"choices": [], "usage": {usage}}}\n\n'.encode() + DONE

    def _event(
        self, index: int, content: str, chunk: Chunk | None = None, logprobs: str = "null"
    ) -> str:
        if chunk is None or chunk.finish_reason is None:
            ending = '"finish_reason": null'
        else:
            ending = (
                f'"finish_reason": "{chunk.finish_reason}", '
                f'"stop_reason": {_json(chunk.stop_reason)}'
            )
        return (
            f'{self._head}"choices": [{{"index": {index}, {content}, "logprobs": {logprobs}, '
            f"{ending}}}]{self._tail}"
        )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
