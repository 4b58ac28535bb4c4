"""Log probabilities as the JSON text of an output tensor.

The form is that of Triton's vLLM backend: a list with one object per token, whose keys are token
ids in decimal, the token itself first, then the likeliest by rank; ``bytes`` is ours.  A client
that has no tokenizer can build any other form from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pocket_backend.api import TokenLogprob
from pocket_backend.text.token_bytes import TokenBytes


def logprobs_json(
    items: Sequence[TokenLogprob | None], token_bytes: TokenBytes | None = None
) -> str:
    """``[{"<id>": {"logprob", "rank", "decoded_token", "bytes"}, ...}, ...]``.

    ``rank`` counts from 1 and is null for a token that is not among the reported alternatives.
    ``None``, the first token of a prompt, is null.  Without ``token_bytes`` texts are empty.
    """
    listed = [None if item is None else _entry(item, token_bytes) for item in items]
    return json.dumps(listed, ensure_ascii=False, separators=(",", ":"))


def _entry(item: TokenLogprob, token_bytes: TokenBytes | None) -> dict[str, object]:
    ranks = {token: rank for rank, token in enumerate(item.top, 1)}
    values = {item.token_id: item.logprob, **item.top}
    found: dict[str, object] = {}
    for token, logprob in values.items():
        data = b"" if token_bytes is None else token_bytes.get(token, skip_special_tokens=False)
        found[str(token)] = {
            "logprob": logprob,
            "rank": ranks.get(token),
            "decoded_token": data.decode("utf-8", "replace"),
            "bytes": list(data),
        }
    return found
