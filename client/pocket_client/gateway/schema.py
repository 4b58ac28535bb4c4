"""Request bodies. Every documented field works or is refused by name; null means absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema, model_validator

from pocket_client.gateway.errors import bad_request, unsupported

_MAX_MESSAGES = 2048
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024
_MAX_BIAS = 1024
_MAX_IDS = 128
_MAX_NAME = 256
_MAX_LOGPROBS = 20
_MAX_BAD_WORDS = 32
_MAX_PROMPT_TOKENS = 1 << 20
_INT32_MAX = 2**31 - 1

Refusals = Mapping[str, tuple[tuple[object, ...], str]]
"""Field -> (values that mean what happens anyway, why all others are refused)."""

_NO_TOOLS = "tool calls are not supported by this version; leave it out"
_NO_STRUCTURE = "structured output is not supported by this version; only text is generated"
_NO_STORE = "nothing is stored here; leave it out"
_NO_REASONING = "this server has no reasoning models; leave it out"
_TEXT_ONLY = "only text is supported"

_REFUSED: Refusals = {
    "cache_salt": ((), "it is derived from the API key and cannot be chosen"),
    "priority": ((), "clients cannot choose it"),
    "prompt_logprobs": ((), "use echo with logprobs of /v1/completions"),
    "best_of": ((1,), "only n is supported; choices are not ranked"),
    "use_beam_search": ((False,), "beam search is not supported"),
    "length_penalty": ((1, 1.0), "it belongs to beam search, which is not supported"),
    "guided_json": ((), _NO_STRUCTURE),
    "guided_regex": ((), _NO_STRUCTURE),
    "guided_choice": ((), _NO_STRUCTURE),
    "guided_grammar": ((), _NO_STRUCTURE),
    "structured_outputs": ((), _NO_STRUCTURE),
    "response_format": (({"type": "text"},), _NO_STRUCTURE),
}
CHAT_REFUSED: Refusals = {
    **_REFUSED,
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none",), _NO_TOOLS),
    "parallel_tool_calls": ((), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none",), _NO_TOOLS),
    "store": ((False,), _NO_STORE),
    "metadata": (({},), _NO_STORE),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "prediction": ((), "predicted outputs are not supported"),
    "reasoning_effort": (("none",), _NO_REASONING),
    "verbosity": ((), "it is not supported"),
    "web_search_options": ((), "there is no web search"),
    "service_tier": (("auto", "default"), "there is one service tier; leave it out"),
    "echo": ((False,), "it only goes with /v1/completions"),
}
COMPLETION_REFUSED: Refusals = {
    **_REFUSED,
    "top_logprobs": ((), "it goes with /v1/chat/completions; use logprobs"),
    "suffix": (("",), "insertion is not supported"),
}
TOKENIZE_REFUSED: Refusals = {
    "add_special_tokens": (
        (),
        "special tokens are added as the model wants them: to a text, not to a conversation",
    ),
    "tools": (([],), _NO_TOOLS),
}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def clean(value: object, refused: Refusals) -> object:
    """Nulls out, refused fields that ask for nothing out.

    Raises:
        ApiError: a refused field, or text that no encoding has.
    """
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        if item is None:
            continue
        if name in refused:
            neutral, reason = refused[name]
            if not any(type(item) is type(one) and item == one for one in neutral):
                raise unsupported(name, reason)
            continue
        _check_text(name, item)
        kept[name] = item
    return kept


def _check_text(name: str, value: object) -> None:
    """JSON can write half of a surrogate pair; nothing that it comes to could."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str) and not item.isascii():
            try:
                item.encode()
            except UnicodeEncodeError:
                raise bad_request(
                    name, "has half of a surrogate pair (\\ud800 to \\udfff)"
                ) from None
        elif isinstance(item, dict):
            left += [*item, *item.values()]
        elif isinstance(item, list) and item and type(item[0]) is not int:  # ids may be many
            left += item


def _cleaned_sampling(value: object, refused: Refusals) -> object:
    """Also checks, by hand, what would make pydantic collect one complaint for each item."""
    cleaned = clean(value, refused)
    if not isinstance(cleaned, dict):
        return cleaned
    if "stop" in cleaned:
        _check_stop(cleaned["stop"])
    bias = cleaned.get("logit_bias")
    if isinstance(bias, dict) and len(bias) > _MAX_BIAS:
        raise bad_request("logit_bias", f"{len(bias)} entries; at most {_MAX_BIAS} are allowed")
    return cleaned


def _check_stop(stop: object) -> None:
    items = [stop] if isinstance(stop, str) else stop
    if not isinstance(items, list):
        raise bad_request("stop", "must be a string or a list of strings")
    if len(items) > _MAX_STOPS:
        raise bad_request("stop", f"{len(items)} items; at most {_MAX_STOPS} are allowed")
    for item in items:
        if not isinstance(item, str) or not 0 < len(item) <= _MAX_STOP_CHARS:
            raise bad_request("stop", f"each must be a string of 1 to {_MAX_STOP_CHARS} characters")


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


_TokenId = Annotated[int, Field(ge=0, le=_INT32_MAX)]
_TokenIds = Annotated[list[_TokenId], FailFast()]
_Messages = Annotated[list[dict[str, Any]], FailFast()]
_BadWord = Annotated[str, Field(min_length=1, max_length=128)]
_TEXT = {"type": "string", "minLength": 1}
_IDS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": _INT32_MAX},
    "minItems": 1,
    "maxItems": _MAX_PROMPT_TOKENS,
}
_ONE_STOP = {**_TEXT, "maxLength": _MAX_STOP_CHARS}
_STOPS = {"type": "array", "items": _ONE_STOP, "maxItems": _MAX_STOPS}
_Stop = Annotated[Any, WithJsonSchema({"anyOf": [_ONE_STOP, _STOPS, {"type": "null"}]})]
_Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]


class _Sampling(Body):
    """What chat and text completions share."""

    model: str = Field(max_length=_MAX_NAME)
    max_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: _Stop = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=_MAX_BIAS
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=_MAX_NAME)
    safety_identifier: str | None = Field(None, max_length=_MAX_NAME)
    prompt_cache_key: str | None = Field(None, max_length=_MAX_NAME)
    # Beyond OpenAI's, under the names that vLLM's server gave them.
    top_k: int | None = Field(None, ge=-1, le=_INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, le=_INT32_MAX)
    stop_token_ids: _TokenIds = Field(default_factory=list, max_length=_MAX_IDS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[_BadWord] = Field(default_factory=list, max_length=_MAX_BAD_WORDS)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> _Sampling:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options", "only goes with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ChatRequest(_Sampling):
    """POST /v1/chat/completions"""

    messages: _Messages = Field(min_length=1, max_length=_MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=_MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, value: object) -> object:
        return _cleaned_sampling(value, CHAT_REFUSED)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise bad_request("max_tokens", "differs from max_completion_tokens; send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs", "only goes with logprobs: true")
        return self

    @property
    def alternatives(self) -> int | None:
        """The wire's ``logprobs``."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Sampling):
    """POST /v1/completions"""

    prompt: _Prompt
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=_MAX_LOGPROBS)

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, value: object) -> object:
        cleaned = _cleaned_sampling(value, COMPLETION_REFUSED)
        if isinstance(cleaned, dict) and "prompt" in cleaned:
            _check_prompt(cleaned["prompt"])
        return cleaned

    @property
    def alternatives(self) -> int | None:
        """The wire's ``logprobs``."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt = self.prompt
        if isinstance(prompt, str) or type(prompt[0]) is int:
            return [prompt]
        return list(prompt)


def _check_prompt(prompt: object) -> None:
    """Raises ApiError unless ``prompt`` is of one of the four forms."""
    if isinstance(prompt, str):
        _check_one_prompt(prompt, "prompt")
        return
    if not isinstance(prompt, list) or not prompt:
        raise bad_request("prompt", "must be a string or a non-empty list")
    if all(type(item) is int for item in prompt):
        _check_one_prompt(prompt, "prompt")
        return
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if kind not in (str, list) or type(item) is not kind:
            raise bad_request("prompt", "must be one string or list of token ids, or a list of one")
        _check_one_prompt(item, f"prompt[{index}]")


def _check_one_prompt(prompt: str | list[Any], name: str) -> None:
    if not prompt:
        raise bad_request(name, "must not be empty")
    if isinstance(prompt, list):
        if len(prompt) > _MAX_PROMPT_TOKENS:
            raise bad_request(name, f"at most {_MAX_PROMPT_TOKENS} token ids are allowed")
        if not all(type(item) is int and 0 <= item <= _INT32_MAX for item in prompt):
            raise bad_request(name, "token ids must be integers from 0 to 2^31-1")


class TokenizeRequest(Body):
    """POST /tokenize: a prompt or messages"""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
    )
    model: str | None = Field(None, max_length=_MAX_NAME)
    prompt: str | None = Field(None, min_length=1)
    messages: _Messages = Field(default_factory=list, max_length=_MAX_MESSAGES)
    add_generation_prompt: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, value: object) -> object:
        return clean(value, TOKENIZE_REFUSED)

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise bad_request("prompt", "send exactly one of prompt and messages")
        if self.prompt is not None and self.add_generation_prompt is not None:
            raise bad_request("add_generation_prompt", "only goes with messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: str | None = Field(None, max_length=_MAX_NAME)
    tokens: _TokenIds = Field(min_length=1, max_length=_MAX_PROMPT_TOKENS)

    @model_validator(mode="before")
    @classmethod
    def _clean(cls, value: object) -> object:
        return clean(value, {})
