"""Chooses one token per row of logits, all rows together: steps 0 and 7 to 12 of docs/sampling.md.

The meaning of every option and the random numbers are those of the C++ sampler, whose tests' cases
this one passes, too. What differs is rounding: exponentials come from torch, so where a random
number falls within 1e-6 of the border between two tokens, the two samplers may choose differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pocket_backend.core.step import ExecuteOutput, TokenLogprobs
from pocket_backend.sampling.philox import uniforms

if TYPE_CHECKING:
    from pocket_backend.api import SamplingParams
    from pocket_backend.core.step import ExecuteRequest
    from pocket_backend.executors.torch_edits import TorchEdits

_INFINITY = float("inf")
_NUCLEUS_GUESS = 128
"""How many candidates are tried before a whole row is sorted for top_p."""
_UNUSABLE, _NOTHING_ALLOWED = -1, -2
_ROW_ERRORS = {
    _UNUSABLE: "the model's logits hold no usable value (NaN or infinity)",
    _NOTHING_ALLOWED: (
        "no token may come next: allowed_token_ids, bad_token_ids and min_tokens exclude all"
    ),
}


def sample(
    logits: Tensor, requests: Sequence[ExecuteRequest], edits: TorchEdits
) -> list[ExecuteOutput]:
    """One output per request.

    Args:
        logits: float32 [requests, ids that may be sampled], contiguous; edited in place.
    """
    reports = _Reports(logits, [request.sampling_params.logprobs for request in requests])
    usable = torch.ones(len(requests), dtype=torch.bool, device=logits.device)
    edited = edits.concern(requests)
    if any(edited):
        usable = logits.amax(dim=1) < _INFINITY  # False for NaN: a mask must not hide it
        edits.apply(logits, requests)
    best, tokens = logits.max(dim=1)  # the lowest id at a tie
    random = [i for i, request in enumerate(requests) if not request.sampling_params.greedy]
    if random:
        chosen = [requests[i] for i in random]
        rows = torch.tensor(random, device=logits.device)
        tokens[rows] = _draw(logits[rows], best[rows], chosen)
    nothing = torch.where(torch.tensor(edited, device=logits.device), _NOTHING_ALLOWED, _UNUSABLE)
    tokens = torch.where(best == -_INFINITY, nothing, tokens)
    tokens = torch.where(usable & (best < _INFINITY), tokens, _UNUSABLE)
    outputs = []
    for row, (request, token) in enumerate(zip(requests, tokens.tolist(), strict=True)):
        if token < 0:
            outputs.append(
                ExecuteOutput(
                    request.request_id, None, finish_reason="error", error=_ROW_ERRORS[token]
                )
            )
        else:
            outputs.append(ExecuteOutput(request.request_id, token, reports.report(row, token)))
    return outputs


class _Reports:
    """Log probabilities of rows that ask for them, of the logits before any edit.

    Args:
        wanted: per row how many alternatives, or None.
    """

    def __init__(self, logits: Tensor, wanted: Sequence[int | None]) -> None:
        self._rows = {row: i for i, row in enumerate(
            [row for row, count in enumerate(wanted) if count is not None])}  # fmt: skip
        self._wanted = wanted
        if not self._rows:
            return
        self._raw = logits[list(self._rows)]  # a copy
        self._normaliser = torch.logsumexp(self._raw.double(), dim=1)
        most = max(count or 0 for count in wanted)
        if most:
            values, ids = _best(self._raw, min(most, logits.shape[1]))
            self._ids = ids.tolist()
            self._values = (values.double() - self._normaliser[:, None]).tolist()

    def report(self, row: int, token: int) -> TokenLogprobs | None:
        count = self._wanted[row]
        if count is None:
            return None
        place = self._rows[row]
        chosen = float(self._raw[place, token].double() - self._normaliser[place])
        if not count:
            return TokenLogprobs(chosen, {})
        pairs = zip(self._ids[place][:count], self._values[place][:count], strict=True)
        return TokenLogprobs(chosen, dict(pairs))


def _draw(logits: Tensor, best: Tensor, requests: Sequence[ExecuteRequest]) -> Tensor:
    """int64 [rows]; what comes out for rows without a finite value means nothing."""
    device = logits.device
    params = [request.sampling_params for request in requests]
    numbers = uniforms([r.seed for r in requests], [r.output_index for r in requests])
    u = torch.from_numpy(numbers).to(device)
    temperature = _column([p.temperature for p in params], device)
    min_p = _column([p.min_p for p in params], device)
    vocab = logits.shape[1]
    by_rank = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < vocab]
    by_id = sorted(set(range(len(params))).difference(by_rank))
    tokens = torch.zeros(len(params), dtype=torch.int64, device=device)
    if by_id:
        rows = torch.tensor(by_id, device=device)
        weights = torch.exp((logits[rows] - best[rows, None]) / temperature[rows])
        weights = torch.where(weights < min_p[rows], 0.0, weights)
        tokens[rows] = _pick(weights, u[rows])
    if by_rank:
        rows = torch.tensor(by_rank, device=device)
        ranked = [params[i] for i in by_rank]
        ids, weights = _rank(logits[rows], best[rows, None], temperature[rows], ranked)
        weights = torch.where(weights < min_p[rows], 0.0, weights)
        tokens[rows] = ids.gather(1, _pick(weights, u[rows])[:, None])[:, 0]
    return tokens


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


def _pick(weights: Tensor, u: Tensor) -> Tensor:
    """The first place per row whose cumulative weight exceeds u * total; never a weight of 0."""
    cumulative = weights.double().cumsum(dim=1)
    total = cumulative[:, -1:].contiguous()
    places = torch.searchsorted(cumulative, u[:, None] * total, right=True)
    # u * total may be rounded up to the total: then it is the last positive weight.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(places, last).clamp_(max=weights.shape[1] - 1)[:, 0]


def _rank(
    logits: Tensor, best: Tensor, temperature: Tensor, params: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """Ids by rank and their weights, 0 behind what top_k and top_p keep: [rows, candidates]."""
    vocab, device = logits.shape[1], logits.device
    top_k = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    limits = torch.tensor(top_k, device=device)[:, None]
    wanted = _column([p.top_p for p in params], device).double()
    open_rows = [k == vocab for k in top_k]
    # Most nuclei are small: look at the few best first, and at all only if those do not reach.
    count = min(vocab, max(_NUCLEUS_GUESS, *[k for k in top_k if k < vocab], 1))
    mass = None
    if any(open_rows):
        mass = torch.exp((logits - best) / temperature).double().sum(dim=1, keepdim=True)
    while True:
        values, ids = _best(logits, count)
        weights = torch.exp((values - best) / temperature)
        within = torch.arange(count, device=device) < limits
        weights = torch.where(within, weights, 0.0)
        cumulative = weights.double().cumsum(dim=1)
        total = cumulative[:, -1:]
        if mass is not None:
            total = torch.where(limits == vocab, mass, total)
        reached = wanted * total
        if count == vocab or mass is None or bool((cumulative[:, -1:] >= reached).all()):
            break
        count = vocab
    # The shortest prefix that reaches: places whose predecessors fall short.
    before = cumulative - weights.double()
    keep = (before < reached) | (wanted >= 1.0)
    keep[:, 0] = True
    return ids, torch.where(keep, weights, 0.0)


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row and their ids, by value, then by lower id."""
    if count >= logits.shape[1]:
        return torch.sort(logits, dim=1, descending=True, stable=True)
    values, ids = torch.topk(logits, count, dim=1)
    # topk keeps any of several equal values: where it had to choose, sort the row instead.
    least = values[:, -1:]
    split = (logits == least).sum(dim=1) > (values == least).sum(dim=1)
    ids = ids.sort(dim=1).values
    values, order = torch.sort(logits.gather(1, ids), dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    for row in torch.nonzero(split)[:, 0].tolist():
        sorted_values, sorted_ids = torch.sort(logits[row], descending=True, stable=True)
        values[row], ids[row] = sorted_values[:count], sorted_ids[:count]
    return values, ids
