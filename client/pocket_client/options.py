"""One request before it is put on the wire, and the names that the wire knows."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypedDict

ENSEMBLE = "pocketllm"
GENERATOR = "generator"
TOKENIZER = "tokenizer"
DETOKENIZER = "detokenizer"

MAX_OUTPUTS = 128
"""The server's limit on ``n``."""
_HEADER_NAME = re.compile(r"[a-z0-9_.-]{1,64}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,1024}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class GenerationOptions(TypedDict, total=False):
    """Everything that ``generate``, ``stream`` and the chat forms accept besides the prompt.

    docs/triton.md gives ranges and defaults. The default temperature is 0: greedy.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    bad_words: str | Sequence[str]
    bad_token_ids: Sequence[int]
    allowed_token_ids: Sequence[int]
    n: int
    logprobs: int
    prompt_logprobs: int
    return_timings: bool
    priority: int
    cache_salt: str


PROMPT_FIELDS = frozenset(
    {
        "text_input",
        "messages",
        "input_ids",
        "tools",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    }
)
WIRE_FIELDS = (
    frozenset(GenerationOptions.__annotations__)
    | PROMPT_FIELDS
    | {
        "prompt",  # how the engine calls the prompt's ids
        "stream",
        "timeout_ms",
        "sampling_parameters",
        "token_ids",
        "text_range",
        "control",
    }
)
"""Names that an error message may start with."""


def new_request_id(prefix: str = "req") -> str:
    """Hard to guess, since whoever knows the id can cancel the request."""
    return f"{prefix}-{secrets.token_hex(16)}"


def valid_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a transport sends. ``parameters`` are JSON values by wire name, without the prompt."""

    request_id: str
    text: str | None = None
    messages_json: str | None = None
    input_ids: tuple[int, ...] | None = None
    flags: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    """``add_generation_prompt`` and ``continue_final_message``, where given."""
    template_kwargs_json: str | None = None
    parameters: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    stream: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    """Sent along as gRPC metadata or HTTP headers (trace context)."""

    def parameters_json(self, timeout: float | None) -> str:
        """``timeout``: seconds that are left, from which the server ends the request by itself."""
        values = {**self.parameters, "stream": self.stream}
        if timeout is not None:
            values["timeout_ms"] = max(1, int(timeout * 1000))
        return json.dumps(values, allow_nan=True)

    @property
    def outputs(self) -> int:
        """How many outputs were asked for; 1 where the server will refuse the value."""
        n = self.parameters.get("n", 1)
        return n if type(n) is int and 0 < n <= MAX_OUTPUTS else 1

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        given = self.parameters.get("stop_token_ids", ())
        return tuple(given) if isinstance(given, list) else ()


def text_request(
    prompt: str | Sequence[int],
    options: Mapping[str, object],
    *,
    stream: bool,
    request_id: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> GenerationRequest:
    """A request that continues text or token ids.

    Raises:
        TypeError: unknown options, or a prompt of another type.
        ValueError: an id that is not 1 to 128 characters of ``A-Za-z0-9._:-``.
    """
    parameters, request_id, sent = _common(options, request_id, headers)
    if isinstance(prompt, str):
        return GenerationRequest(
            request_id, text=prompt, parameters=parameters, stream=stream, headers=sent
        )
    ids = tuple(prompt)
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ValueError("prompt: token ids must be integers from 0 to 2^31-1")
    return GenerationRequest(
        request_id, input_ids=ids, parameters=parameters, stream=stream, headers=sent
    )


def chat_request(
    messages: Sequence[Mapping[str, object]],
    options: Mapping[str, object],
    *,
    stream: bool,
    request_id: str | None = None,
    headers: Mapping[str, str] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
) -> GenerationRequest:
    """A request that answers a conversation; raises as ``text_request`` does."""
    parameters, request_id, sent = _common(options, request_id, headers)
    flags = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    return GenerationRequest(
        request_id,
        messages_json=json.dumps([dict(message) for message in messages]),
        flags={name: value for name, value in flags.items() if value is not None},
        template_kwargs_json=(
            None if chat_template_kwargs is None else json.dumps(dict(chat_template_kwargs))
        ),
        parameters=parameters,
        stream=stream,
        headers=sent,
    )


def _common(
    options: Mapping[str, object], request_id: str | None, headers: Mapping[str, str] | None
) -> tuple[dict[str, object], str, tuple[tuple[str, str], ...]]:
    if request_id is None:
        request_id = new_request_id()
    elif not valid_request_id(request_id):
        raise ValueError("request_id: must be 1 to 128 characters of A-Za-z0-9._:-")
    parameters = {}
    for name, value in options.items():
        if name not in GenerationOptions.__annotations__:
            raise TypeError(f"unknown option {name!r}")
        if value is not None:
            parameters[name] = _plain(value)
    sent = tuple((headers or {}).items())
    for name, value in sent:
        if not (_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
            raise ValueError(
                f"headers: {name[:64]!r} or its value has characters that no header has"
            )
    return parameters, request_id, sent


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value
