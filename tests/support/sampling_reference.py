"""The sampling semantics of docs/sampling.md, written slowly over numpy, sharing nothing with the
engine.

``processed`` walks every token of the vocabulary; ``distribution`` sorts all of it; ``uniform`` is
Philox4x32-10 with Python integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pocket_backend.api import SamplingParams

_MASK32 = 2**32 - 1


def processed(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ending_ids: Iterable[int] = (),
) -> np.ndarray:
    """Float32 [vocab] after bias, penalties and masks."""
    row = logits.astype(np.float32).copy()
    ending = set(ending_ids) if len(output) < params.min_tokens else set()
    f32 = np.float32
    for token in range(len(row)):
        x = row[token]
        if token in params.logit_bias:
            x = x + f32(params.logit_bias[token])
        if params.repetition_penalty != 1.0 and (token in prompt or token in output):
            penalty = f32(params.repetition_penalty)
            x = x / penalty if x > 0 else x * penalty
        count = sum(1 for seen in output if seen == token)
        if count:
            x = x - f32(params.frequency_penalty) * f32(count)
            x = x - f32(params.presence_penalty)
        forbidden = token in params.bad_token_ids or token in ending
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            forbidden = True
        row[token] = -np.inf if forbidden else x
    return row


def distribution(row: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """(ids, probabilities) that are left, in the order in which the uniform number walks them."""
    order = np.lexsort((np.arange(len(row)), -row))
    best = np.float64(row[order[0]])
    weights = np.exp((row.astype(np.float64) - best) / params.temperature)
    by_rank = params.top_p < 1.0 or 0 < params.top_k < len(row)
    kept = order
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1.0:
        mass = np.cumsum(weights[kept])
        kept = kept[: int(np.argmax(mass >= params.top_p * mass[-1])) + 1]
    kept = kept[weights[kept] >= max(params.min_p, np.finfo(np.float64).tiny)]
    if not by_rank:
        kept = np.sort(kept)
    return kept, weights[kept] / weights[kept].sum()


def choose(row: np.ndarray, params: SamplingParams, seed: int, index: int) -> set[int]:
    """The token to be drawn: more than one where float32 rounding may decide between neighbours."""
    if params.greedy:
        return {int(np.argmax(row))}
    ids, probabilities = distribution(row, params)
    u = uniform(seed % 2**64, index)
    slack = 2e-6
    ends = np.cumsum(probabilities)
    low = min(int(np.searchsorted(ends, u - slack, side="right")), len(ids) - 1)
    high = min(int(np.searchsorted(ends, u + slack, side="right")), len(ids) - 1)
    return {int(token) for token in ids[low : high + 1]}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Float64."""
    x = logits.astype(np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def uniform(seed: int, index: int) -> float:
    """Philox4x32-10; counter (index, 0, 0), key seed; 53 bits."""
    counter = [index & _MASK32, index >> 32, 0, 0]
    key = [seed & _MASK32, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & _MASK32,
            (a >> 32) ^ counter[3] ^ key[1],
            a & _MASK32,
        ]
        key = [(key[0] + 0x9E3779B9) & _MASK32, (key[1] + 0xBB67AE85) & _MASK32]
    return ((counter[0] << 32 | counter[1]) >> 11) * 2.0**-53
