"""What a request must satisfy before it is admitted; runs on the caller's thread."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pocket_backend.api import (
    GenerationRequest,
    InvalidRequestError,
    SamplingParams,
    UnsupportedFeatureError,
)

MAX_REQUEST_ID = 256
MAX_CACHE_SALT = 256
MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one engine."""

    vocab_size: int
    max_model_len: int
    """Tokens (prompt and output) per request."""
    capacity_tokens: int
    """KV tokens that the pool holds for all requests together."""
    has_tokenizer: bool
    supports_feature: Callable[[str], bool]


def token_tuple(tokens: Iterable[int]) -> tuple[int, ...]:
    """Token ids of any integer type (numpy's, say) as plain ints.

    Raises:
        InvalidRequestError: something is not an integer.
    """
    try:
        return tuple([operator.index(token) for token in tokens])
    except TypeError:
        raise InvalidRequestError.of(
            "prompt_tokens", tokens, "must be a list of integers"
        ) from None


def validate_request(request: GenerationRequest, limits: RequestLimits) -> None:
    """Check everything that can be known before scheduling.

    Raises:
        InvalidRequestError: names the field, the value and the limit.
        UnsupportedFeatureError: names the feature that the backend lacks.
    """
    _check_text("request_id", request.request_id, 1, MAX_REQUEST_ID)
    _check_text("cache_salt", request.cache_salt, 0, MAX_CACHE_SALT)
    priority = request.priority
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        raise InvalidRequestError.of("priority", priority, "must be a 32-bit integer")
    deadline = request.deadline_seconds
    if deadline is not None and not (
        type(deadline) in (int, float) and math.isfinite(deadline) and deadline > 0
    ):
        raise InvalidRequestError.of(
            "deadline_seconds", deadline, "must be a finite number above 0"
        )
    _check_prompt(request.prompt_tokens, request.sampling_params, limits)
    _check_features(request.sampling_params, limits)


def _check_text(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, str) or not low <= len(value) <= high:
        raise InvalidRequestError.of(name, value, f"must be a string of {low} to {high} characters")


def _check_prompt(tokens: object, params: SamplingParams, limits: RequestLimits) -> None:
    if not isinstance(tokens, tuple):
        raise InvalidRequestError.of("prompt_tokens", tokens, "must be a tuple of token ids")
    if not tokens:
        raise InvalidRequestError(
            "prompt_tokens: got an empty prompt; give at least one token", field="prompt_tokens"
        )
    count, context = len(tokens), limits.max_model_len
    if count >= context:
        wanted = "" if params.max_tokens is None else f" (max_tokens is {params.max_tokens})"
        raise InvalidRequestError(
            f"prompt_tokens: got {count} tokens; the context holds {context}, so a prompt may "
            f"have at most {context - 1} and leave room for an answer{wanted}",
            field="prompt_tokens",
        )
    if count + 1 > limits.capacity_tokens:
        raise InvalidRequestError(
            f"prompt_tokens: got {count} tokens; the KV pool holds {limits.capacity_tokens}, "
            "and the first output token needs one; shorten the prompt or start the engine with "
            "more KV memory",
            field="prompt_tokens",
        )
    for token in tokens:
        if type(token) is not int or not 0 <= token < limits.vocab_size:
            raise InvalidRequestError.of(
                "prompt_tokens", token, f"token ids are integers from 0 to {limits.vocab_size - 1}"
            )
    room = context - count
    if params.min_tokens > room:
        raise InvalidRequestError.of(
            "min_tokens",
            params.min_tokens,
            f"the prompt has {count} of the context's {context} tokens, so at most {room} fit",
        )


def _check_features(params: SamplingParams, limits: RequestLimits) -> None:
    # n is the scheduler's doing: forks share prompt blocks, with any executor.
    for feature in sorted(params.required_features() - {"n"}):
        if not limits.supports_feature(feature):
            raise UnsupportedFeatureError(
                feature, "this engine's backend does not offer it", field=feature
            )
    if params.stop and not limits.has_tokenizer:
        raise UnsupportedFeatureError(
            "stop", "stop strings need an engine with a tokenizer; use stop_token_ids", field="stop"
        )
    if params.bad_words and not limits.has_tokenizer:
        raise UnsupportedFeatureError(
            "bad_words",
            "words need an engine with a tokenizer; use bad_token_ids",
            field="bad_words",
        )
    for name in ("stop_token_ids", "logit_bias", "bad_token_ids", "allowed_token_ids"):
        for token in getattr(params, name) or ():
            if token >= limits.vocab_size:
                raise InvalidRequestError.of(
                    name, token, f"token ids are integers from 0 to {limits.vocab_size - 1}"
                )
