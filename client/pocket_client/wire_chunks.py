"""One response of the ensemble as chunks, whichever way its outputs were encoded.

A response of a stream belongs to one output of the request. The one response to ``stream=False``
has all outputs, in vectors of ``n`` elements, and their token ids in a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pocket_client.errors import ServerError
from pocket_client.logprobs import TokenLogprobs, read_logprobs
from pocket_client.options import GenerationRequest
from pocket_client.results import Chunk, FinishReason, Usage, stop_reason_of

FINISH_REASONS = frozenset(get_args(FinishReason))
OUTPUTS = (
    "text_output",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "num_input_tokens",
    "num_output_tokens",
    "num_cached_tokens",
)
"""What every request asks for."""

Values = Mapping[str, Sequence[Any]]
"""Elements of each output: strings, integers or floats."""


def wanted_outputs(request: GenerationRequest) -> tuple[str, ...]:
    """Names of the outputs that this request's answer is read from."""
    asked = request.parameters
    names: tuple[str, ...] = OUTPUTS
    if request.outputs > 1:
        names += ("sequence_index",)
    if asked.get("logprobs") is not None:
        names += ("logprobs", "cumulative_logprob")
    if asked.get("prompt_logprobs") is not None:
        names += ("prompt_logprobs",)
    if asked.get("return_timings"):
        names += ("timings",)
    return names


def chunks_of(values: Values, request: GenerationRequest) -> list[Chunk]:
    """The chunks of one response.

    Raises:
        ServerError: an output is missing or malformed.
    """
    try:
        return _chunks(values, request)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise ServerError(f"the server sent a malformed response ({error!r})") from None


def _chunks(values: Values, request: GenerationRequest) -> list[Chunk]:
    texts, reasons, stops = values["text_output"], values["finish_reason"], values["stop_reason"]
    indexes = values["sequence_index"] if request.outputs > 1 else range(len(texts))
    counts = values["num_output_tokens"]
    ids = tuple(values["token_ids"])
    prompt_tokens, cached_tokens = values["num_input_tokens"][0], values["num_cached_tokens"][0]
    if not all(
        type(item) is int for item in (*ids, *counts, *indexes, prompt_tokens, cached_tokens)
    ):
        raise ValueError("not integers")
    if not all(type(text) is str for text in (*texts, *reasons, *stops)):
        raise ValueError("not texts")
    chunks = []
    begin = 0
    for place, (index, text) in enumerate(zip(indexes, texts, strict=True)):
        reason = reasons[place]
        if reason and reason not in FINISH_REASONS:
            raise ServerError(f"the server sent an unknown finish reason: {reason[:32]!r}")
        if not 0 <= index < request.outputs:
            raise ValueError(f"sequence_index {index}")
        # Counts of several outputs are those of whole outputs: their shares of the ids.
        end = begin + counts[place] if len(texts) > 1 else len(ids)
        chunks.append(
            Chunk(
                text,
                ids[begin:end],
                reason or None,
                stop_reason_of(stops[place], request.stop_token_ids),
                Usage(prompt_tokens, counts[place], cached_tokens),
                index,
                _scores(values.get("logprobs", ()), place),
                _at(values.get("cumulative_logprob", ()), place),
                _prompt(values.get("prompt_logprobs", ())) if index == 0 else (),
                _timings(values.get("timings", ()), place),
            )
        )
        begin = end
    return chunks


def _at(items: Sequence[Any], place: int) -> Any:
    return items[place] if place < len(items) else None


def _scores(items: Sequence[str], place: int) -> tuple[TokenLogprobs, ...]:
    text = _at(items, place)
    found = read_logprobs(text) if text is not None else ()
    return tuple(item for item in found if item is not None)


def _prompt(items: Sequence[str]) -> tuple[TokenLogprobs | None, ...]:
    return read_logprobs(items[0]) if items else ()


def _timings(items: Sequence[str], place: int) -> Mapping[str, float] | None:
    text = _at(items, place)
    if text is None:
        return None
    return {str(name): float(value) for name, value in json.loads(text).items()}
