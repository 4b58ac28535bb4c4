"""The sampling reference against Transformers' logits processors, where both have an option.

The engine is compared with the reference elsewhere (test_cpp_engine_sampling.py); here the
reference itself has to agree with somebody else's reading of the same definitions.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_reference import distribution, processed
from transformers import generation as hf

from pocket_backend.api import SamplingParams

pytestmark = pytest.mark.parity

VOCAB = 60
PROMPT = [1, 5, 9, 5]
OUTPUT = [7, 9, 9]


def row(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


def through(processor, logits: np.ndarray) -> np.ndarray:
    ids = torch.tensor([PROMPT + OUTPUT])
    return processor(ids, torch.tensor(logits)[None].clone())[0].numpy()


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty(penalty: float) -> None:
    ours = processed(row(1), SamplingParams(repetition_penalty=penalty), PROMPT, OUTPUT)
    theirs = through(hf.RepetitionPenaltyLogitsProcessor(penalty), row(1))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_bias_then_repetition_penalty() -> None:
    bias = {9: 4.0, 30: -2.0}
    params = SamplingParams(logit_bias=bias, repetition_penalty=1.7)
    biased = through(hf.SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()]), row(2))
    theirs = through(hf.RepetitionPenaltyLogitsProcessor(1.7), biased)
    np.testing.assert_allclose(processed(row(2), params, PROMPT, OUTPUT), theirs, rtol=1e-6)


@pytest.mark.parametrize("least", [0, 3, 4, 9])
def test_min_tokens(least: int) -> None:
    theirs = through(
        hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), least, [3, 8], device="cpu"), row(3)
    )
    ours = processed(row(3), SamplingParams(min_tokens=least), PROMPT, OUTPUT, {3, 8})
    assert np.array_equal(ours, theirs)
    assert np.isinf(ours).any() == (least > len(OUTPUT))


@pytest.mark.parametrize(
    ("fields", "warpers"),
    [
        ({"top_k": 7}, [hf.TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, [hf.MinPLogitsWarper(0.1)]),
        ({"top_k": 20, "top_p": 0.6}, [hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.6)]),
    ],
    ids=["top_k", "top_p", "min_p", "top_k and top_p"],
)
def test_what_truncation_leaves(fields: dict[str, float], warpers: list) -> None:
    for seed in range(20):
        logits = row(seed)
        params = SamplingParams(temperature=1.3, **fields)  # type: ignore[arg-type]
        theirs = through(hf.TemperatureLogitsWarper(1.3), logits)
        for warper in warpers:
            theirs = through(warper, theirs)
        ids, probabilities = distribution(logits, params)
        expected = torch.softmax(torch.tensor(theirs, dtype=torch.float64), dim=-1).numpy()
        assert sorted(ids.tolist()) == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(probabilities, expected[ids], rtol=1e-5)
