"""From OpenAI's fields to the wire's: one upstream request for each choice."""

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
)
_DEFAULT_TEMPERATURE = 1.0
"""OpenAI's; the wire's own default is greedy."""
_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's for text completions; a chat ends where the model ends it."""
_SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request, ready to run. Choice ``i`` of the answer is upstream request ``i``."""

    id: str
    kind: str
    """``chat`` or ``completion``."""
    stream: bool
    include_usage: bool
    requests: tuple[GenerationRequest, ...]
    prompt_of_choice: tuple[int, ...]
    """Index of each choice's prompt: a prompt's tokens are counted once, whatever ``n``."""
    echo: tuple[str, ...] = ()
    """Text to put before each choice; empty without ``echo``."""
    field_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What the client called the wire's fields, for error messages."""


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
        requests = tuple(
            chat_request(
                body.messages,
                _parameters(body, limit, tenant, index),
                stream=body.stream,
                request_id=f"{name}-{index}",
                headers=headers,
                add_generation_prompt=body.add_generation_prompt,
                chat_template_kwargs=body.chat_template_kwargs,
                **flags,
            )
            for index in range(n)
        )
    except RecursionError:
        raise bad_request("messages", "nested too deeply") from None
    names = {"prompt": "messages", "text_input": "messages", **_penalty_name(body)}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return Generation(
        name, "chat", body.stream, body.include_usage, requests, (0,) * n, field_names=names
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
    choices = [(p, i) for p in range(len(prompts)) for i in range(n)]
    return Generation(
        name,
        "completion",
        body.stream,
        body.include_usage,
        tuple(
            text_request(
                prompts[prompt],
                _parameters(body, limit, tenant, index),
                stream=body.stream,
                request_id=f"{name}-{prompt * n + index}",
                headers=headers,
            )
            for prompt, index in choices
        ),
        tuple(prompt for prompt, _ in choices),
        echo=tuple(str(prompts[prompt]) for prompt, _ in choices) if body.echo else (),
        field_names={"text_input": "prompt", "input_ids": "prompt", **_penalty_name(body)},
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
    body: ChatRequest | CompletionRequest, limit: int | None, tenant: Tenant, index: int
) -> dict[str, object]:
    """``index``: which of a prompt's choices; each has a seed of its own."""
    values: dict[str, object] = {name: getattr(body, name) for name in _SAME_NAME}
    values["temperature"] = _DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    if body.top_p == 0:  # the wire has no 0: what is left is the likeliest token
        values["temperature"] = 0.0
    else:
        values["top_p"] = body.top_p
    values["max_tokens"] = limit
    values["stop"] = body.stops or None
    if body.seed is not None:
        values["seed"] = body.seed if index == 0 else (body.seed + index) % _SEEDS
    values["cache_salt"] = tenant.cache_salt or None
    return {name: value for name, value in values.items() if value is not None and value != []}
