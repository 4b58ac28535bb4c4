"""Refusing, with the numbers, what could never run or has no place in the queue."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pocket_backend.api.errors import InvalidRequestError

if TYPE_CHECKING:
    from pocket_backend.core.request import ScheduledRequest
    from pocket_backend.core.step import MemoryInfo

MAX_PRIORITY = 2**31 - 1
MAX_NAME_LENGTH = 1024
"""Characters of an adapter's name or a salt: both are kept as long as their namespace is cached."""


def token_limit(memory: MemoryInfo) -> int:
    """Tokens (prompt and output) that one sequence may hold: the context, or the whole pool if that
    is smaller. It depends on nothing that happens at run time, so neither does any output."""
    return min(memory.max_context, memory.num_blocks * memory.block_size)


def check_request(request: ScheduledRequest, memory: MemoryInfo) -> None:
    """Raise unless the request, alone on the machine, could produce a token.

    Raises:
        InvalidRequestError: empty or too long a prompt, token ids outside the vocabulary, or
            another value outside its range.
    """
    prompt = request.num_prompt_tokens
    if prompt == 0:
        raise InvalidRequestError.of("prompt_tokens", prompt, "must have at least one token")
    known = len(request.tokens)
    if known >= memory.max_context:
        raise InvalidRequestError(
            f"prompt_tokens: {known} tokens leave no room for output in a context of "
            f"{memory.max_context}; send at most {memory.max_context - 1}",
            field="prompt_tokens",
        )
    capacity = memory.num_blocks * memory.block_size
    if known >= capacity:
        needed = -(-(known + 1) // memory.block_size)
        raise InvalidRequestError(
            f"prompt_tokens: {known} tokens and one of output need {needed} KV blocks of "
            f"{memory.block_size} tokens, and the pool has {memory.num_blocks}; send at most "
            f"{capacity - 1} tokens, or give the server a larger KV cache",
            field="prompt_tokens",
        )
    vocab = memory.vocab_size
    low, high = min(request.tokens), max(request.tokens)
    if low < 0 or high >= vocab:
        raise InvalidRequestError.of(
            "prompt_tokens", low if low < 0 else high, f"token ids are 0 to {vocab - 1}"
        )
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidRequestError.of(
            "priority", request.priority, f"must be from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    deadline = request.deadline_seconds
    if deadline is not None and not (math.isfinite(deadline) and deadline > 0):
        raise InvalidRequestError.of(
            "deadline_seconds", deadline, "must be a finite number of seconds above 0"
        )
    for name, value in (("cache_salt", request.namespace.salt), ("adapter", request.adapter)):
        if len(value) > MAX_NAME_LENGTH:
            raise InvalidRequestError.of(
                name, value, f"must have at most {MAX_NAME_LENGTH} characters"
            )
    for token in request.sampling_params.stop_token_ids:
        if token >= vocab:
            raise InvalidRequestError.of("stop_token_ids", token, f"token ids are 0 to {vocab - 1}")
