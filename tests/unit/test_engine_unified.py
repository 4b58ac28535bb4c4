"""UnifiedEngine: what it answers, alone and among others, and which limits it keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_support import (
    Gate,
    Recorder,
    alone,
    assert_baseline,
    engine_threads,
    make_engine,
    request,
    wait_until,
)

from pocket_backend.api import (
    ConfigurationError,
    EngineArgs,
    InvalidRequestError,
    OverloadedError,
    SamplingParams,
    UnsupportedFeatureError,
)
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.fake import FakeExecutor, FakeOptions


def test_generate_as_documented() -> None:
    with UnifiedEngine(FakeExecutor(), max_batch_size=8, max_total_tokens=8192) as engine:
        events = list(engine.generate(prompt_tokens=[1, 2, 3], max_tokens=100))
    tokens = [event["token_id"] for event in events if event["type"] == "token"]
    assert tokens == list(alone(request("x", (1, 2, 3), 100)).results()[0].token_ids)
    finish = events[-1]
    assert finish["type"] == "finish"
    assert finish["finish_reason"] == "length"
    assert finish["usage"]["total_tokens"] == 103
    assert [event["type"] for event in events].count("finish") == 1


def test_streamed_text_equals_one_shot() -> None:
    asked = request("a", b"hello", 60)
    expected = alone(asked, text=True).results()[0]
    engine, executor = make_engine(text=True)
    with engine:
        events = list(engine.stream(asked))
        dicts = list(engine.generate(b"hello", 60))
        assert_baseline(engine, executor)
    assert "".join(event.text for event in events) == expected.text
    assert "".join(str(event["text"]) for event in dicts) == expected.text
    assert engine.tokenizer is not None
    assert engine.tokenizer.decode(expected.token_ids) == expected.text


def test_sixteen_concurrent_requests_equal_their_sequential_runs() -> None:
    options = FakeOptions(num_blocks=96, block_size=4, max_batch_tokens=24, eos_probability=0.01)
    asked = [
        request(f"r{i}", tuple((7 * i + j) % 250 + 1 for j in range(3 + 5 * i)), 10 + 3 * i)
        for i in range(16)
    ]
    engine, executor = make_engine(options, max_batch_size=16, max_total_tokens=384)
    with engine:
        with ThreadPoolExecutor(16) as pool:
            streams = pool.map(lambda r: list(engine.stream(r)), asked)
            results = [tuple(t for e in events for t in e.token_ids) for events in streams]
        assert_baseline(engine, executor)
    for one, tokens in zip(asked, results, strict=True):
        assert tokens == alone(one, options).results()[0].token_ids, one.request_id


def test_slot_order_and_arrival_order_do_not_matter() -> None:
    asked = [request(f"r{i}", (i + 1, 9), 6, temperature=0.7, seed=5) for i in range(6)]
    expected = [alone(one).results()[0].token_ids for one in asked]
    for order in (asked, asked[::-1]):
        engine, _ = make_engine(max_batch_size=3)
        with engine:
            streams = {one.request_id: engine.stream(one) for one in order}
            tokens = [
                tuple(t for e in streams[one.request_id] for t in e.token_ids) for one in asked
            ]
        assert tokens == expected


def test_overload_is_refused_at_once() -> None:
    gate = Gate()
    engine, executor = make_engine(max_batch_size=1, max_queue=2)
    executor.faults.before_step = gate
    with engine:
        sinks = [Recorder() for _ in range(3)]
        for index, sink in enumerate(sinks):
            engine.submit(request(f"r{index}", (1, 2)), sink)
        refused = Recorder()
        with pytest.raises(OverloadedError, match="limit is 3"):
            engine.submit(request("one too many", (1, 2)), refused)
        gate.open.set()
        assert [sink.wait().finish_reason for sink in sinks] == ["length"] * 3
        assert refused.events == []
        assert len(list(engine.generate([1, 2], 2))) == 3
        assert_baseline(engine, executor)


def test_duplicate_ids_are_refused_while_open_and_free_afterwards() -> None:
    gate = Gate()
    engine, executor = make_engine()
    executor.faults.before_step = gate
    with engine:
        sink = Recorder()
        engine.submit(request("same", (1, 2)), sink)
        with pytest.raises(InvalidRequestError, match="request_id"):
            engine.submit(request("same", (3, 4)), Recorder())
        gate.open.set()
        sink.wait()
        again = Recorder()
        engine.submit(request("same", (3, 4)), again)
        assert again.wait().finish_reason == "length"


def test_an_id_can_be_reused_from_its_own_last_event() -> None:
    engine, _ = make_engine()
    second = Recorder()

    def sink(event) -> None:
        if event.last:
            engine.submit(request("same", (3, 4)), second)

    with engine:
        engine.submit(request("same", (1, 2)), sink)
        assert second.wait().finish_reason == "length"


def test_refused_before_admission() -> None:
    options = FakeOptions(max_context=32, vocab_size=50, features=frozenset({"batch_mode"}))
    engine, executor = make_engine(options)
    cases = [
        (request("a", ()), InvalidRequestError, "empty prompt"),
        (request("a", range(1, 33)), InvalidRequestError, "32 tokens; the context holds 32"),
        (request("a", (1, 50)), InvalidRequestError, "0 to 49"),
        (request("a", (1, -1)), InvalidRequestError, "0 to 49"),
        (request("a", (1,), stop_token_ids=[10**9]), InvalidRequestError, "stop_token_ids"),
        (request("a", (1,), stop=["x"]), UnsupportedFeatureError, "stop"),
        (request("a", (1,), logprobs=1), UnsupportedFeatureError, "logprobs"),
        (request("a", (1,), min_p=0.5), UnsupportedFeatureError, "min_p"),
        (request("", (1,)), InvalidRequestError, "request_id"),
        (request("a" * 300, (1,)), InvalidRequestError, "request_id"),
        (request("a", (1,), deadline_seconds=0.0), InvalidRequestError, "deadline_seconds"),
        (request("a", (1,), deadline_seconds=float("nan")), InvalidRequestError, "deadline"),
        (request("a", (1,), priority=2**40), InvalidRequestError, "priority"),
        (request("a", (1,), cache_salt="x" * 300), InvalidRequestError, "cache_salt"),
    ]
    with engine:
        for asked, error, message in cases:
            sink = Recorder()
            with pytest.raises(error, match=message):
                engine.submit(asked, sink)
            assert sink.events == []
        with pytest.raises(InvalidRequestError, match="prompt_tokens"):
            engine.generate(["a"])  # type: ignore[list-item]
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            engine.generate([1], 0)
        with pytest.raises(InvalidRequestError, match="temperature"):
            engine.generate([1], 2, temperature=float("nan"))
        with pytest.raises(UnsupportedFeatureError, match="no_such_parameter"):
            engine.generate([1], 2, no_such_parameter=1)
        with pytest.raises(InvalidRequestError, match="not both"):
            engine.generate([1], 2, sampling_params=SamplingParams())
        assert executor.steps == 0
        assert len(list(engine.generate(range(1, 32), 5))) == 2, "31 of 32: room for one token"


def test_missing_max_tokens_does_not_reserve_the_context() -> None:
    options = FakeOptions(
        num_blocks=64, block_size=16, max_context=512, max_slots=8, eos_probability=0.05
    )
    most = 0

    def watch(requests) -> None:
        nonlocal most
        most = max(most, len(requests))

    engine, executor = make_engine(options)
    executor.faults.before_step = watch
    with engine:
        sinks = [Recorder() for _ in range(8)]
        for index, sink in enumerate(sinks):
            engine.submit(request(f"r{index}", (index + 1, 2), None), sink)
        for sink in sinks:
            sink.wait()
    assert most == 8


def test_bad_limits_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_batch_size"):
        UnifiedEngine(FakeExecutor(), max_batch_size=0)
    with pytest.raises(ConfigurationError, match="max_total_tokens"):
        UnifiedEngine(FakeExecutor(), max_total_tokens=3)
    with pytest.raises(ConfigurationError, match="max_model_len"):
        UnifiedEngine(FakeExecutor(FakeOptions(max_context=64)), max_model_len=65)
    wait_until(lambda: not engine_threads())


def test_limits_are_kept() -> None:
    widest = 0

    def watch(requests) -> None:
        nonlocal widest
        widest = max(widest, len(requests))

    engine, executor = make_engine(max_batch_size=2, max_total_tokens=64, max_model_len=40)
    executor.faults.before_step = watch
    with engine:
        assert engine.max_model_len == 40
        assert engine.memory_info.max_context == 4096
        sinks = [Recorder() for _ in range(5)]
        for index, sink in enumerate(sinks):
            engine.submit(request(f"r{index}", (index + 1,), None), sink)
        for sink in sinks:
            assert sink.wait().finish_reason == "length"
            assert len(sink.token_ids) == 39
        assert engine.stats().blocks_total == 4
    assert widest == 2


def test_from_args_with_the_fake_backend() -> None:
    args = EngineArgs(
        model="fake",
        backend="fake",
        max_batch_size=3,
        max_model_len=128,
        kv_cache_tokens=512,
        backend_options={"block_size": 8, "timeout_ms": 60000},
    )
    with UnifiedEngine.from_args(args) as engine:
        assert engine.memory_info.num_blocks == 64
        assert engine.memory_info.max_context == 128
        assert engine.tokenizer is not None
        assert len(list(engine.generate(engine.tokenizer.encode("hi"), 4))) == 5
