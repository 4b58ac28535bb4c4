"""LLM: prompts in, results out; and the import names of the older API."""

from __future__ import annotations

import threading

import pytest
from engine_support import alone, make_engine, request

from pocket_backend.api import (
    ConfigurationError,
    EngineArgs,
    EngineError,
    InvalidRequestError,
    SamplingParams,
    UnsupportedFeatureError,
)
from pocket_backend.engine.llm import LLM

FAKE = EngineArgs(model="fake", backend="fake")


def expected(prompt: bytes, count: int):
    return alone(request("x", prompt, count), text=True).results()[0]


def test_one_prompt() -> None:
    with LLM(FAKE) as llm:
        [result] = llm.generate("hello", SamplingParams(max_tokens=7))
    assert result.text == expected(b"hello", 7).text
    assert result.token_ids == expected(b"hello", 7).token_ids
    assert (result.finish_reason, result.usage.prompt_tokens) == ("length", 5)
    assert result.timings.total_seconds > 0


def test_many_prompts_keep_their_order_and_parameters() -> None:
    prompts = [f"prompt {i}" for i in range(40)]
    params = [SamplingParams(max_tokens=1 + i % 5) for i in range(40)]
    with LLM(model="fake", backend="fake", max_batch_size=4, max_queue=3) as llm:
        results = llm.generate(prompts, params)
    for prompt, one, result in zip(prompts, params, results, strict=True):
        assert one.max_tokens is not None
        assert result.text == expected(prompt.encode(), one.max_tokens).text


def test_token_prompts() -> None:
    with LLM(FAKE) as llm:
        params = SamplingParams(max_tokens=3)
        [a] = llm.generate(prompt_tokens=[1, 2, 3], sampling_params=params)
        [b, c] = llm.generate([[1, 2, 3], [4, 5]], params)
    assert a.token_ids == b.token_ids != c.token_ids


def test_several_choices() -> None:
    with LLM(FAKE) as llm:
        results = llm.generate(["a", "b"], SamplingParams(max_tokens=4, n=3, temperature=1.0))
    assert [result.choice_index for result in results] == [0, 1, 2, 0, 1, 2]
    assert len({result.token_ids for result in results}) == 6


def test_serial_when_batching_is_off() -> None:
    for args in (
        EngineArgs(model="fake", backend="fake", enable_batching=False),
        EngineArgs(model="fake", backend="fake", backend_options={"enable_batching": False}),
    ):
        with LLM(args) as llm:
            widths = []
            executor = llm.engine._stepper.executor
            executor.faults.before_step = lambda requests, widths=widths: widths.append(
                len(requests)
            )
            llm.generate(["a", "b", "c"], SamplingParams(max_tokens=3))
        assert set(widths) == {1}


def test_stream_equals_generate() -> None:
    params = SamplingParams(max_tokens=20)
    with LLM(FAKE) as llm:
        [result] = llm.generate("hello", params)
        events = list(llm.stream("hello", params))
        again = list(llm.generate_stream(prompt_tokens=list(b"hello"), sampling_params=params))
    assert "".join(event.text for event in events) == result.text
    assert tuple(token for event in again for token in event.token_ids) == result.token_ids


def test_chat_and_chat_stream() -> None:
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=5)
    with LLM(FAKE) as llm:
        answer = llm.chat(messages, params, request_id="chat-1")
        streamed = "".join(event.text for event in llm.chat_stream(messages, params))
        assert answer.request_id == "chat-1"
        assert answer.text == expected(b"user: hi\nassistant: ", 5).text == streamed
        with pytest.raises(UnsupportedFeatureError, match="tools"):
            llm.chat(messages, params, tools=[{}])
        with pytest.raises(InvalidRequestError, match="no_such"):
            llm.chat(messages, params, no_such=1)
        assert llm.chat(messages, params, reasoning=None).text == answer.text


def test_bad_prompts_are_refused_before_anything_runs() -> None:
    with LLM(FAKE) as llm:
        for prompts in ("", [], [""], [[]], ["ok", ""], 5, [5], None, ["a", [300]], ["a", ["b"]]):
            with pytest.raises(InvalidRequestError):
                llm.generate(prompts, SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequestError, match="sampling_params"):
            llm.generate(["a", "b"], [SamplingParams()])
        with pytest.raises(InvalidRequestError, match="either"):
            llm.generate("a", prompt_tokens=[1])
        assert llm.health().ready


def test_a_failing_prompt_raises_and_cancels_the_others() -> None:
    with LLM(FAKE) as llm:
        executor = llm.engine._stepper.executor
        real = executor.execute_model

        def execute(requests):
            for asked in requests:
                if asked.start_position == 0 and asked.token_ids[0] == ord("X"):
                    executor.faults.failing_requests.add(asked.request_id)
            return real(requests)

        executor.execute_model = execute
        with pytest.raises(EngineError, match="told to fail"):
            llm.generate(["a", "X", "c"], SamplingParams(max_tokens=3000))
        executor.faults.failing_requests.clear()
        assert llm.generate("a", SamplingParams(max_tokens=2))
        assert llm.engine.stats().requests["cancelled"] == 2


def test_cancel_by_id() -> None:
    with LLM(EngineArgs(model="fake", backend_options={"delay_seconds": 0.01})) as llm:
        stream = llm.stream("hello", request_id="mine")
        next(stream)
        assert llm.cancel("mine")
        assert list(stream)[-1].finish_reason == "cancelled"
        assert not llm.cancel("mine")


def test_several_threads_share_an_engine() -> None:
    with LLM(FAKE) as llm:
        found: dict[int, str] = {}

        def work(index: int) -> None:
            [result] = llm.generate(f"p{index}", SamplingParams(max_tokens=10))
            found[index] = result.text

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {i: expected(f"p{i}".encode(), 10).text for i in range(8)}


def test_a_given_engine_stays_open() -> None:
    engine, _ = make_engine(text=True)
    with engine:
        with LLM(engine=engine) as llm:
            assert llm.generate("a", SamplingParams(max_tokens=1))
        assert engine.health().ready


def test_without_a_tokenizer_text_is_refused() -> None:
    engine, _ = make_engine()
    with engine, LLM(engine=engine) as llm:
        with pytest.raises(UnsupportedFeatureError, match="tokenizer"):
            llm.generate("text")
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))


def test_constructor_forms() -> None:
    with pytest.raises(ConfigurationError, match="EngineArgs"):
        LLM()
    with pytest.raises(ConfigurationError, match="not both"):
        LLM(FAKE, model="fake")
    with pytest.raises(ConfigurationError, match="no_such"):
        LLM(model="fake", no_such=1)
    with pytest.raises(UnsupportedFeatureError, match="tensor_parallel_size"):
        LLM(model="fake", tensor_parallel_size=2)
    with LLM("fake", tensor_parallel_size=1, device="auto") as llm:  # type: ignore[arg-type]
        assert llm.generate("a", SamplingParams(max_tokens=1))


def test_older_import_names() -> None:
    import pocketllm

    assert pocketllm.LLM is LLM
    assert pocketllm.EngineArgs is EngineArgs
    assert pocketllm.SamplingParams is SamplingParams
    for name in pocketllm.__all__:
        assert getattr(pocketllm, name) is not None
    assert set(pocketllm.__all__) <= set(dir(pocketllm))
    with pytest.raises(AttributeError):
        pocketllm.no_such_name  # noqa: B018
    args = pocketllm.EngineArgs(
        model="fake",
        backend="fake",
        backend_options={"enable_batching": True, "max_batch_size": 4},
    )
    with pocketllm.LLM(args) as llm:
        [result] = llm.generate(
            prompt_tokens=[1, 2, 3], sampling_params=pocketllm.SamplingParams(max_tokens=100)
        )
        assert len(result.token_ids) == 100
        assert llm.engine.max_batch_size == 4


@pytest.mark.parametrize("snapshots", [0, 1, 5])
def test_recurrent_state_gives_the_same_tokens_under_pressure(snapshots: int) -> None:
    stem = list(range(60))
    prompts = [[*stem[: 10 * (i % 6)], i] for i in range(24)]
    params = [SamplingParams(max_tokens=20 + i, n=1 + i % 2, seed=i) for i in range(24)]

    def run(**options: object) -> list[tuple[int, ...]]:
        args = EngineArgs("fake", "fake", backend_options={"recurrent": True, **options})
        with LLM(args) as llm:
            return [result.token_ids for result in llm.generate(prompts, params)]

    wide = run(max_state_snapshots=0)
    tight = run(
        num_blocks=40,
        block_size=4,
        max_state_snapshots=snapshots,
        state_snapshot_interval_tokens=8,
    )
    assert tight == wide
