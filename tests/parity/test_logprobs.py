"""Log probabilities of prompt and output: the engine's own log-softmax, and Transformers'.

On the exact path (float activations, f32 KV) logits agree within 1e-3 (test_smollm2.py), and
log-softmax moves by at most twice what its logits move. Against the same engine's logits only the
rounding of one float32 is left.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_driver import Driver

from pocket_backend import LLM, EngineArgs, SamplingParams
from pocket_backend.api import TokenLogprob

pytestmark = pytest.mark.parity

COUNT = 12
TOP = 5


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def check(
    items: tuple[TokenLogprob | None, ...], tokens: list[int], rows: np.ndarray, bound: float
) -> None:
    """``rows[i]`` are the log probabilities from which token i came."""
    assert len(items) == len(tokens) == len(rows)
    for item, token, row in zip(items, tokens, rows, strict=True):
        assert item is not None
        assert item.token_id == token
        assert abs(item.logprob - row[token]) < bound
        assert len(item.top) == TOP
        values = list(item.top.values())
        assert values == sorted(values, reverse=True)
        for other, value in item.top.items():
            assert abs(value - row[other]) < bound
        # The alternatives are the likeliest, up to ties within the bound.
        assert values[-1] >= np.sort(row)[-TOP] - bound


def test_log_probabilities_of_prompt_and_output(smollm2) -> None:
    prompt = smollm2.chat("What is the capital of France?")
    args = EngineArgs(
        model=str(smollm2.path),
        precision="f32",
        kv_cache_dtype="f32",
        max_model_len=512,
        max_batch_size=2,
        max_num_batched_tokens=16,  # a prompt of several chunks
    )
    own = Driver(smollm2.path, context=512, precision="f32", kv_dtype="f32")
    with LLM(args) as llm:
        for seed, temperature in ((1, 0.0), (2, 1.5)):
            [result] = llm.generate(
                prompt_tokens=prompt,
                sampling_params=SamplingParams(
                    max_tokens=COUNT, ignore_eos=True, temperature=temperature, seed=seed,
                    logprobs=TOP, prompt_logprobs=TOP,
                ),
            )  # fmt: skip
            answer = list(result.token_ids)
            for logits, bound in (
                (own.all_logits(prompt + answer[:-1]), 1e-5),
                (smollm2.logits(prompt + answer[:-1]), 2e-3),
            ):
                rows = log_softmax(logits)
                assert result.prompt_logprobs[0] is None
                check(result.prompt_logprobs[1:], prompt[1:], rows[: len(prompt) - 1], bound)
                check(result.logprobs, answer, rows[len(prompt) - 1 :], bound)
            total = sum(item.logprob for item in result.logprobs)
            assert result.cumulative_logprob == pytest.approx(total)
