"""Log probabilities as they come from the wire: JSON text of one object per token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token with its log probability (natural logarithm) under the model's own logits."""

    token_id: int
    token: str
    """Its text; U+FFFD where it is not whole characters."""
    bytes: bytes
    logprob: float
    rank: int | None
    """1 is the likeliest; None: not among the alternatives that were asked for."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token of a text, and the likeliest alternatives in its place, best first."""

    chosen: TokenScore
    top: tuple[TokenScore, ...] = ()


def read_logprobs(text: str) -> tuple[TokenLogprobs | None, ...]:
    """The entries of a ``logprobs`` or ``prompt_logprobs`` output; the first token of a prompt has
    none.

    Raises:
        ValueError: the text is not what the server's documentation says.
    """
    entries = json.loads(text)
    if not isinstance(entries, list):
        raise ValueError("log probabilities are not a list")
    return tuple(None if entry is None else _entry(entry) for entry in entries)


def _entry(entry: object) -> TokenLogprobs:
    if not isinstance(entry, Mapping) or not entry:
        raise ValueError("an entry of the log probabilities is not an object")
    try:
        scores = [
            TokenScore(
                int(name),
                str(item["decoded_token"]),
                bytes(item["bytes"]),
                float(item["logprob"]),
                item["rank"],
            )
            for name, item in entry.items()
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"an entry of the log probabilities is malformed ({error!r})") from None
    return TokenLogprobs(scores[0], tuple(score for score in scores if score.rank is not None))
