"""From OpenAI's fields to the wire's: one upstream request for each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pocket_client.gateway.auth import Tenant
from pocket_client.gateway.errors import bad_request
from pocket_client.gateway.schema import ChatRequest, CompletionRequest
from pocket_client.options import GenerationRequest, chat_request, new_request_id, text_request

_SAME_NAME = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "logit_bias",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "bad_words",
)
_DEFAULT_TEMPERATURE = 1.0
"""OpenAI's; the wire's own default is greedy."""
_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's for text completions; a chat ends where the model ends it."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request, ready to run. Upstream request ``p`` is that of prompt ``p``; its output
    ``i`` is choice ``p * n + i`` of the answer."""

    id: str
    kind: str
    """``chat`` or ``completion``."""
    stream: bool
    include_usage: bool
    requests: tuple[GenerationRequest, ...]
    n: int = 1
    """Choices of each prompt."""
    echo: tuple[str, ...] = ()
    """Text to put before the choices of each prompt; empty without ``echo``."""
    alternatives: int | None = None
    """Log probabilities: how many of the likeliest tokens each has; None: they are not asked for.
    """
    field_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What the client called the wire's fields, for error messages."""

    @property
    def choices(self) -> int:
        return len(self.requests) * self.n


def chat_generation(
    body: ChatRequest, tenant: Tenant, headers: Mapping[str, str], max_choices: int
) -> Generation:
    """Raises ApiError for what cannot be sent."""
    name = new_request_id("chatcmpl")
    n = body.n or 1
    if n > max_choices:
        raise bad_request("n", f"got {n}; at most {max_choices} choices are allowed")
    limit = body.max_completion_tokens or body.max_tokens
    flags = {"continue_final_message": body.continue_final_message}
    try:
        request = chat_request(
            body.messages,
            _parameters(body, limit, tenant),
            stream=body.stream,
            request_id=f"{name}-0",
            headers=headers,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
            **flags,
        )
    except RecursionError:
        raise bad_request("messages", "nested too deeply") from None
    names = {
        "prompt": "messages",
        "text_input": "messages",
        "logprobs": "top_logprobs" if body.top_logprobs else "logprobs",
        **_penalty_name(body),
    }
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return Generation(
        name,
        "chat",
        body.stream,
        body.include_usage,
        (request,),
        n,
        alternatives=body.alternatives,
        field_names=names,
    )


def completion_generation(
    body: CompletionRequest, tenant: Tenant, headers: Mapping[str, str], max_choices: int
) -> Generation:
    """Raises ApiError for what cannot be sent."""
    name = new_request_id("cmpl")
    prompts, n = body.prompts, body.n or 1
    if len(prompts) * n > max_choices:
        raise bad_request(
            "prompt" if len(prompts) > max_choices else "n",
            f"{len(prompts)} prompts with n {n} make {len(prompts) * n} choices; at most "
            f"{max_choices} are allowed",
        )
    if body.echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise bad_request("echo", "only goes with prompts of text")
    limit = body.max_tokens or _DEFAULT_COMPLETION_TOKENS
    parameters = _parameters(body, limit, tenant)
    if body.echo and body.logprobs is not None:
        parameters["prompt_logprobs"] = body.logprobs
    return Generation(
        name,
        "completion",
        body.stream,
        body.include_usage,
        tuple(
            text_request(
                prompt,
                parameters,
                stream=body.stream,
                request_id=f"{name}-{index}",
                headers=headers,
            )
            for index, prompt in enumerate(prompts)
        ),
        n,
        echo=tuple(str(prompt) for prompt in prompts) if body.echo else (),
        alternatives=body.alternatives,
        field_names={
            "text_input": "prompt",
            "input_ids": "prompt",
            "prompt_logprobs": "logprobs",
            **_penalty_name(body),
        },
    )


def _penalty_name(body: ChatRequest | CompletionRequest) -> dict[str, str]:
    """The server refuses the feature; the client wants to read the field."""
    for name, off in (
        ("frequency_penalty", 0),
        ("presence_penalty", 0),
        ("repetition_penalty", 1),
    ):
        if getattr(body, name) not in (None, off):
            return {"penalties": name}
    return {}


def _parameters(
    body: ChatRequest | CompletionRequest, limit: int | None, tenant: Tenant
) -> dict[str, object]:
    values: dict[str, object] = {name: getattr(body, name) for name in _SAME_NAME}
    values["temperature"] = _DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    if body.top_p == 0:  # the wire has no 0: what is left is the likeliest token
        values["temperature"] = 0.0
    else:
        values["top_p"] = body.top_p
    values["max_tokens"] = limit
    values["stop"] = body.stops or None
    values["seed"] = body.seed
    values["n"] = body.n if body.n != 1 else None
    values["logprobs"] = body.alternatives
    values["cache_salt"] = tenant.cache_salt or None
    return {name: value for name, value in values.items() if value is not None and value != []}
