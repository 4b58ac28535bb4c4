"""Inputs and outputs of the `tokenizer` and `detokenizer` models, called directly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pocket_client.errors import InvalidRequestError, ServerError
from pocket_client.transport import OutputValue, TensorValue

_INT32_MAX = 2**31 - 1
MAX_IDS = 1 << 20


def tokenize_inputs(
    prompt: str | Sequence[Mapping[str, object]], add_generation_prompt: bool | None
) -> dict[str, TensorValue]:
    if isinstance(prompt, str):
        return {"text_input": prompt}
    inputs: dict[str, TensorValue] = {"messages": json.dumps([dict(item) for item in prompt])}
    if add_generation_prompt is not None:
        inputs["add_generation_prompt"] = add_generation_prompt
    return inputs


def detokenize_inputs(token_ids: Sequence[int]) -> dict[str, TensorValue]:
    """One chunk of everything: no context, and a range that ends where the text ends.

    Raises:
        InvalidRequestError: no ids, too many, or one that is no int32 id.
    """
    ids = tuple(token_ids)
    if not 0 < len(ids) <= MAX_IDS:
        raise InvalidRequestError(
            f"token_ids: got {len(ids)}; must be 1 to {MAX_IDS} ids", field="token_ids"
        )
    for item in ids:
        if type(item) is not int or not 0 <= item <= _INT32_MAX:
            raise InvalidRequestError(
                "token_ids: each must be an integer from 0 to 2^31-1", field="token_ids"
            )
    return {"context_ids": (), "token_ids": ids, "text_range": (0, _INT32_MAX)}


def ids_output(value: OutputValue) -> tuple[int, ...]:
    if isinstance(value, str):
        raise ServerError("the tokenizer sent text in place of ids")
    return value


def text_output(value: OutputValue) -> str:
    if not isinstance(value, str):
        raise ServerError("the detokenizer sent ids in place of text")
    return value
