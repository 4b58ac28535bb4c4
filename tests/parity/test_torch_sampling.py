"""The batched sampler of the PyTorch backend against the same slow reference, and the same cases,
as the C++ sampler's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_cases import CASES, EOS, PROMPT, VOCAB
from sampling_reference import choose, distribution, log_softmax, processed, uniform

from pocket_backend.api import EngineError, SamplingParams
from pocket_backend.core.step import ExecuteOutput, ExecuteRequest
from pocket_backend.executors.torch_edits import TorchEdits
from pocket_backend.executors.torch_sampler import sample
from pocket_backend.sampling.philox import philox4x32_10, uniforms

pytestmark = pytest.mark.parity

CPU = torch.device("cpu")


def request(
    params: SamplingParams, slot: int, output: Sequence[int], *, new: bool, seed: int = 7
) -> ExecuteRequest:
    known = [*PROMPT, *output]
    return ExecuteRequest(
        request_id=f"r{slot}",
        token_ids=tuple(known if new else known[-1:]),
        slot_id=slot,
        is_prefill=new,
        sampling_params=params,
        start_position=0 if new else len(known) - 1,
        is_new=new,
        output_index=len(output),
        seed=seed,
        known_tokens=known if new and params.has_penalties else None,
        ending_ids=EOS if params.min_tokens else frozenset(),
    )


def step(
    edits: TorchEdits, logits: np.ndarray, requests: Sequence[ExecuteRequest]
) -> list[ExecuteOutput]:
    for item in requests:
        if item.is_new:
            edits.start(item)
        else:
            edits.advance(item)
    return sample(torch.from_numpy(logits.copy()), requests, edits)


def rows(count: int, seed: int, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (count, VOCAB)).astype(np.float32)


def test_all_cases_in_one_batch_draw_what_the_reference_draws() -> None:
    edits = TorchEdits(len(CASES), VOCAB, CPU)
    outputs: list[list[int]] = [[] for _ in CASES]
    for index in range(24):
        logits = rows(len(CASES), index)
        batch = [
            request(params, slot, outputs[slot], new=index in (0, 9), seed=slot - 3)
            for slot, params in enumerate(CASES.values())
        ]
        found = step(edits, logits, batch)
        for slot, (name, params) in enumerate(CASES.items()):
            row = processed(logits[slot], params, PROMPT, outputs[slot], EOS)
            token = found[slot].token_id
            assert token in choose(row, params, slot - 3, index), (name, index)
            outputs[slot].append(token)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    logits = rows(len(CASES), 50)
    batch = [request(params, slot, (), new=True) for slot, params in enumerate(CASES.values())]
    together = step(TorchEdits(len(CASES), VOCAB, CPU), logits, batch)
    for slot, item in enumerate(batch):
        [alone] = step(TorchEdits(len(CASES), VOCAB, CPU), logits[slot : slot + 1], [item])
        assert alone == together[slot]


@pytest.mark.parametrize("fields", [
    {}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.6, "min_p": 0.05},
    {"top_p": 0.999, "temperature": 5.0},
], ids=str)  # fmt: skip
def test_frequencies_are_the_distribution(fields: dict[str, float]) -> None:
    """4,000 seeds in one batch; chi-square far beyond chance would be a wrong law."""
    params = SamplingParams(**{"temperature": 1.1, **fields})  # type: ignore[arg-type]
    count = 4000
    row = rows(1, 3)
    batch = [replace(request(params, 0, (), new=False, seed=s), slot_id=0) for s in range(count)]
    found = sample(torch.from_numpy(row.repeat(count, 0)), batch, TorchEdits(1, VOCAB, CPU))
    ids, probabilities = distribution(row[0], params)
    drawn = np.bincount([output.token_id for output in found], minlength=VOCAB)  # type: ignore[misc]
    assert drawn[ids].sum() == count
    common = probabilities * count >= 5
    expected = np.append(probabilities[common], probabilities[~common].sum()) * count
    seen = np.append(drawn[ids[common]], drawn[ids[~common]].sum())
    inside = expected > 0
    chi2 = ((seen - expected)[inside] ** 2 / expected[inside]).sum()
    freedom = max(1, inside.sum() - 1)
    assert chi2 < freedom + 6 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("top_k", [1, 3, 64, 200])
def test_ties_go_to_the_lowest_ids(top_k: int) -> None:
    """Five values only: every rank is a tie, at the cut of top_k as well."""
    row = np.random.default_rng(1).integers(0, 5, VOCAB).astype(np.float32)
    best = np.lexsort((np.arange(VOCAB), -row))
    greedy = request(SamplingParams(logprobs=20), 0, (), new=True)
    drawn = [
        request(SamplingParams(temperature=3.0, top_k=top_k), 1, (), new=True, seed=seed)
        for seed in range(64)
    ]
    logits = np.repeat(row[None], 65, 0)
    first, *others = step(TorchEdits(2, VOCAB, CPU), logits, [greedy, *drawn])
    assert first.token_id == best[0]
    assert first.logprobs is not None
    assert first.logprobs.top is not None
    assert list(first.logprobs.top) == best[:20].tolist()
    for item, output in zip(drawn, others, strict=True):
        assert output.token_id in choose(row, item.sampling_params, item.seed, 0)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = rows(3, 8)
    everything = CASES["everything"]
    batch = [
        request(everything, 0, (), new=True),
        request(SamplingParams(), 1, (), new=True),
        request(SamplingParams(logprobs=0), 2, (), new=True),
    ]
    found = step(TorchEdits(3, VOCAB, CPU), logits, batch)
    assert found[1].logprobs is None
    for row, count in ((0, 20), (2, 0)):
        expected = log_softmax(logits[row])
        report = found[row].logprobs
        assert report is not None
        assert report.top is not None
        assert report.token_logprob == pytest.approx(expected[found[row].token_id], abs=1e-5)
        best = np.lexsort((np.arange(VOCAB), -logits[row]))[:count]
        assert list(report.top) == best.tolist()
        np.testing.assert_allclose(list(report.top.values()), expected[best], atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "everything", "bad ids", "allowed ids", "truncated"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_row_fails_alone(name: str, value: float) -> None:
    logits = rows(2, 9)
    batch = [request(CASES[name], slot, (), new=True) for slot in (0, 1)]
    good = step(TorchEdits(2, VOCAB, CPU), logits, batch)
    if value == -np.inf:
        logits[1] = value  # nothing else is usable, either
    else:
        logits[1, 2] = value  # an id that masks and bans hide
    first, second = step(TorchEdits(2, VOCAB, CPU), logits, batch)
    assert first == good[0]
    assert (second.token_id, second.finish_reason) == (None, "error")
    assert second.error is not None


def test_a_row_with_nothing_allowed_says_so() -> None:
    impossible = SamplingParams(allowed_token_ids=(2, 9), min_tokens=1, temperature=1.0)
    batch = [request(impossible, 0, (), new=True), request(CASES["plain"], 1, (), new=True)]
    bad, good = step(TorchEdits(2, VOCAB, CPU), rows(2, 4), batch)
    assert bad.error is not None
    assert "no token may come next" in bad.error
    assert good.token_id is not None


def test_a_tiny_penalty_overflows_to_the_largest_float() -> None:
    params = SamplingParams(repetition_penalty=1e-300)
    [output] = step(TorchEdits(1, VOCAB, CPU), rows(1, 2), [request(params, 0, (), new=True)])
    assert output.token_id in PROMPT


def test_history_needs_all_tokens() -> None:
    edits = TorchEdits(1, VOCAB, CPU)
    incomplete = request(CASES["frequency"], 0, (), new=True)
    incomplete.known_tokens = None
    with pytest.raises(EngineError, match="need known_tokens"):
        edits.start(incomplete)
    edits.start(request(CASES["frequency"], 0, (), new=True))
    with pytest.raises(EngineError, match="tokens 6 to 7 never came"):
        edits.advance(request(CASES["frequency"], 0, (1, 2, 3), new=False))
    edits.drop(0)
    edits.advance(request(CASES["frequency"], 0, (1, 2, 3), new=False))


def test_random_numbers_are_those_of_the_reference() -> None:
    seeds = [0, 7, -1, 2**63, 2**64 - 1, 123456789012345]
    indices = [0, 1, 2**40, 5, 2**32, 77]
    expected = [uniform(s % 2**64, i) for s, i in zip(seeds, indices, strict=True)]
    assert uniforms(seeds, indices).tolist() == expected


def test_philox_gives_the_published_words() -> None:
    """Random123's known answers: zeros, all ones, digits of pi (as in the C++ test)."""
    counters = np.array([
        [0, 0, 0, 0], [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
    ], dtype=np.uint64)  # fmt: skip
    keys = np.array([[0, 0], [0xFFFFFFFF] * 2, [0xA4093822, 0x299F31D0]], dtype=np.uint64)
    words = philox4x32_10(tuple(counters.T), tuple(keys.T))
    assert np.array(words).T.tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
