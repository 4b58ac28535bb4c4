"""The body of POST /v1/responses. Every documented field works or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator

from pocket_client.gateway.errors import bad_request, unsupported
from pocket_client.gateway.schema import Body, Refusals, clean

_MAX_ITEMS = 2048
_MAX_PARTS = 256
_MAX_NAME = 256
_INT32_MAX = 2**31 - 1
_ROLES = ("user", "assistant", "system", "developer")
_PART_KINDS = ("input_text", "output_text", "text")

_NO_TOOLS = "tool calls are not supported by this version; leave it out"
_NO_STORE = "nothing is stored here; send the whole conversation as input"
_TEXT_ONLY = "only text is supported"
_DEFAULT_TEXT: tuple[object, ...] = ({}, {"format": {"type": "text"}})
REFUSED: Refusals = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "max_tool_calls": ((), _NO_TOOLS),
    "text": (_DEFAULT_TEXT, "structured output is not supported by this version; only text is"),
    "include": (([],), "nothing can be included by this version"),
    "top_logprobs": ((0,), "log probabilities are not supported here; leave it out"),
    "reasoning": (({}, {"effort": "none"}), "this server has no reasoning models; leave it out"),
    "store": ((False,), _NO_STORE),
    "metadata": (({},), _NO_STORE),
    "previous_response_id": ((), _NO_STORE),
    "conversation": ((), _NO_STORE),
    "prompt": ((), "there are no stored prompts; send input"),
    "background": ((False,), "it is not supported; stream, or wait for the answer"),
    "background_options": ((), "background responses are not supported"),
    "context_management": (([],), "it is not supported"),
    "truncation": (("disabled",), "the input is never cut silently; send less of it"),
    "service_tier": (("auto", "default"), "there is one service tier; leave it out"),
    "prompt_cache_retention": ((), "prefixes are cached without hints"),
    "prompt_cache_options": ((), "prefixes are cached without hints"),
    "moderation": ((), "there is no moderation"),
    "image": ((), _TEXT_ONLY),
    "access_programs": ((), "there are none"),
    "cache_salt": ((), "it is derived from the API key and cannot be chosen"),
    "priority": ((), "clients cannot choose it"),
}
"""Field -> (values that mean what happens anyway, why all others are refused)."""

_INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "object"}, "minItems": 1},
    ]
}


class ResponsesStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(Body):
    """POST /v1/responses"""

    model: str = Field(max_length=_MAX_NAME)
    input: Annotated[Any, WithJsonSchema(_INPUT_SCHEMA)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    user: str | None = Field(None, max_length=_MAX_NAME)
    safety_identifier: str | None = Field(None, max_length=_MAX_NAME)
    prompt_cache_key: str | None = Field(None, max_length=_MAX_NAME)
    # Beyond OpenAI's, as in chat completions.
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    top_k: int | None = Field(None, ge=-1, le=_INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    ignore_eos: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, value: object) -> object:
        return clean(value, REFUSED)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "only goes with stream: true")
        return self

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat completions take it.

        Raises:
            ApiError: an input item that is no message of text.
        """
        first = []
        if self.instructions is not None:
            first.append({"role": "system", "content": self.instructions})
        return [*first, *_input_messages(self.input)]


def _input_messages(given: object) -> list[dict[str, Any]]:
    if isinstance(given, str):
        if not given:
            raise bad_request("input", "must not be empty")
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not 0 < len(given) <= _MAX_ITEMS:
        raise bad_request("input", f"must be a string or a list of 1 to {_MAX_ITEMS} items")
    return [_message(item, f"input[{index}]") for index, item in enumerate(given)]


def _message(item: object, name: str) -> dict[str, Any]:
    """One item: a message as a client writes it, or an earlier answer's output sent back."""
    if not isinstance(item, Mapping):
        raise bad_request(name, "must be an object")
    kind = item.get("type", "message")
    if kind != "message":
        raise unsupported(f"{name}.type", "only messages are supported by this version")
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise bad_request(f"{name}.role", f"must be one of {', '.join(_ROLES)}")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list) or not 0 < len(content) <= _MAX_PARTS:
        raise bad_request(
            f"{name}.content", f"must be a string or a list of 1 to {_MAX_PARTS} parts of text"
        )
    return {
        "role": role,
        "content": "".join(
            _text(part, f"{name}.content[{index}]") for index, part in enumerate(content)
        ),
    }


def _text(part: object, name: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") not in _PART_KINDS:
        raise unsupported(f"{name}.type", f"must be one of {', '.join(_PART_KINDS)}: {_TEXT_ONLY}")
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_request(f"{name}.text", "must be a string")
    return text
