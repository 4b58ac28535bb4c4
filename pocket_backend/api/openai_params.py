"""``SamplingParams`` from the fields of an OpenAI request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocket_backend.api.errors import InvalidRequestError, UnsupportedFeatureError, short_repr

# Taken as they are; the rest of a request says what to continue, not how.
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "stop",
    "n",
    "ignore_eos",
    "min_tokens",
)


def openai_fields(body: Mapping[str, object]) -> dict[str, Any]:
    """Arguments of ``SamplingParams`` for an OpenAI chat or completion request.

    Absent and null fields keep our defaults. ``logprobs`` may be a flag (chat) or a number
    (completions).

    Raises:
        InvalidRequestError: a malformed ``logit_bias`` or ``logprobs``.
    """
    found: dict[str, Any] = {name: body[name] for name in _SAME if body.get(name) is not None}
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            found["max_tokens"] = body[name]
            break
    bias = body.get("logit_bias")
    if bias is not None:
        if not isinstance(bias, Mapping):
            raise InvalidRequestError.of("logit_bias", bias, "must map token ids to numbers")
        found["logit_bias"] = {_token(key): value for key, value in bias.items()}
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    if logprobs is True:
        found["logprobs"] = 0 if top is None else top
    elif logprobs is not None and logprobs is not False:
        found["logprobs"] = logprobs
    elif top:
        raise InvalidRequestError.of("top_logprobs", top, "needs logprobs")
    if body.get("response_format") is not None:
        found["response_format"] = body["response_format"]
    return found


def check_response_format(value: object) -> None:
    """Raises UnsupportedFeatureError unless the format is plain text."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise InvalidRequestError.of("response_format", value, 'must be like {"type": "text"}')
    if value["type"] != "text":
        raise UnsupportedFeatureError(
            f"response_format {short_repr(value['type'])}",
            "there is no structured output",
            field="response_format",
        )


def _token(key: object) -> int:
    try:
        return int(key)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        raise InvalidRequestError.of("logit_bias", key, "keys are token ids") from None
