"""Cases that every backend's sampler has to pass against ``sampling_reference``."""

from __future__ import annotations

from pocket_backend.api import SamplingParams

VOCAB = 320
EOS = frozenset({2, 9})
PROMPT = (5, 17, 300, 17, 5, 40)

CASES = {
    "plain": SamplingParams(),
    "repetition": SamplingParams(repetition_penalty=1.7),
    "encouraged repetition": SamplingParams(repetition_penalty=0.5),
    "tiny repetition": SamplingParams(repetition_penalty=1e-30),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=-0.8),
    "all penalties": SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4, temperature=0.9
    ),
    "bias": SamplingParams(logit_bias={11: 100.0, 12: -3.5}),
    "bias and penalty": SamplingParams(logit_bias={11: 3.0, 17: 2.0}, repetition_penalty=2.0),
    "bad ids": SamplingParams(bad_token_ids=tuple(range(0, 320, 2)), temperature=1.0),
    "allowed ids": SamplingParams(allowed_token_ids=(0, 31, 32, 63, 64, 319), temperature=2.0),
    "min tokens": SamplingParams(min_tokens=4, allowed_token_ids=(2, 9, 10), temperature=5.0),
    "truncated": SamplingParams(temperature=1.3, top_k=50, top_p=0.9, min_p=0.02),
    "nucleus after penalties": SamplingParams(
        temperature=2.0, top_p=0.8, repetition_penalty=1.5, frequency_penalty=0.5
    ),
    "everything": SamplingParams(
        temperature=1.5,
        top_k=100,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={7: 1.5, 8: -2.0},
        bad_token_ids=(1, 3),
        allowed_token_ids=tuple(range(200)),
        min_tokens=5,
        logprobs=20,
    ),
}
