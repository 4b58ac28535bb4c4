"""UnifiedEngine on its own thread: streaming, concurrency, cancellation, failures, shutdown."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_support import (
    WAIT,
    Gate,
    ManualClock,
    Recorder,
    alone,
    assert_baseline,
    make_engine,
    request,
    wait_until,
)

from pocket_backend.api import (
    BackendUnavailableError,
    ConfigurationError,
    DeadlineExceededError,
    EngineArgs,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    SamplingParams,
    UnsupportedFeatureError,
)
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.fake import FakeExecutor, FakeOptions

SLOW = FakeOptions(delay_seconds=0.01)
"""Forty seconds for an answer without a limit: still there when it is cancelled."""


def engine_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("pocket-engine")]


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


def test_cancel_while_queued() -> None:
    gate = Gate()
    engine, executor = make_engine(max_batch_size=1)
    executor.faults.before_step = gate
    with engine:
        running, queued = Recorder(), Recorder()
        engine.submit(request("run", (1, 2)), running)
        gate.wait_until_inside()
        handle = engine.submit(request("wait", (3, 4)), queued)
        assert handle.cancel()
        gate.open.set()
        last = queued.wait()
        assert (last.finish_reason, queued.token_ids) == ("cancelled", ())
        assert running.wait().finish_reason == "length"
        assert not handle.cancel()
        assert_baseline(engine, executor)


def test_cancel_in_the_inbox_right_after_submit() -> None:
    engine, executor = make_engine(SLOW)
    with engine:
        for index in range(50):
            sink = Recorder()
            assert engine.submit(request(f"r{index}", (1, 2), None), sink).cancel()
            assert sink.wait().finish_reason == "cancelled"
        assert_baseline(engine, executor)


def test_cancel_during_prefill_takes_effect_in_that_step() -> None:
    gate = Gate()
    engine, executor = make_engine(FakeOptions(max_batch_tokens=8))
    executor.faults.before_step = gate
    with engine:
        sink = Recorder()
        engine.submit(request("a", range(1, 41)), sink)
        gate.wait_until_inside()
        assert engine.cancel("a")
        gate.open.set()
        assert sink.wait().finish_reason == "cancelled"
        assert sink.token_ids == ()
        assert executor.steps == 1
        assert_baseline(engine, executor)


def test_cancel_while_decoding_and_after_the_end() -> None:
    engine, executor = make_engine(SLOW)
    with engine:
        stream = engine.stream(request("a", (1, 2), None))
        for _ in range(3):
            next(stream)
        assert stream.cancel()
        events = list(stream)
        assert events[-1].finish_reason == "cancelled"
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens < 4000
        assert not engine.cancel("a")
        assert not engine.cancel("never seen")
        assert_baseline(engine, executor)


def test_leaving_a_generate_loop_cancels() -> None:
    engine, executor = make_engine(SLOW)
    with engine:
        for event in engine.generate([1, 2, 3]):
            if event["type"] == "token":
                break
        del event
        wait_until(lambda: engine.stats().requests["cancelled"] == 1, "cancelled after break")
        iterator = engine.generate([4, 5])
        next(iterator)
        iterator.close()
        with pytest.raises(StopIteration):
            next(iterator)
        unread = engine.generate([6, 7])
        del unread
        gc.collect()
        wait_until(lambda: engine.stats().requests["cancelled"] == 3, "cancelled when dropped")
        assert_baseline(engine, executor)


def test_a_dropped_or_closed_stream_cancels() -> None:
    engine, executor = make_engine(SLOW)
    with engine:
        for event in engine.stream(request("a", (1, 2), None)):
            assert event.token_ids
            break
        with engine.stream(request("b", (1, 2), None)) as stream:
            next(stream)
        wait_until(lambda: engine.stats().requests["cancelled"] == 2)
        assert_baseline(engine, executor)


def test_stream_get_times_out_and_goes_on() -> None:
    gate = Gate()
    engine, executor = make_engine()
    executor.faults.before_step = gate
    with engine:
        stream = engine.stream(request("a", (1, 2), 2))
        gate.wait_until_inside()
        with pytest.raises(TimeoutError, match="'a'"):
            stream.get(timeout=0.01)
        gate.open.set()
        assert [event.last for event in stream] == [False, True]
        with pytest.raises(StopIteration):
            stream.get()


def test_a_failing_request_raises_its_error_in_generate() -> None:
    engine, executor = make_engine()
    executor.faults.failing_requests.add("bad")
    with engine:
        iterator = engine.generate([1, 2], request_id="bad")
        with pytest.raises(EngineError, match="told to fail"):
            list(iterator)
        assert len(list(engine.generate([1, 2], 3))) == 4
        assert engine.health().ready
        assert_baseline(engine, executor)


def test_a_failing_step_fails_nobody_else() -> None:
    engine, executor = make_engine()

    def explode(requests) -> None:
        if any(asked.request_id == "bad" for asked in requests):
            raise MemoryError("out of memory")

    executor.faults.before_step = explode
    with engine:
        sinks = {name: Recorder() for name in ("a", "bad", "b")}
        for index, (name, sink) in enumerate(sinks.items()):
            engine.submit(request(name, (index + 1, 5), 20), sink)
        assert isinstance(sinks["bad"].wait().error, EngineError)
        for index, name in ((0, "a"), (2, "b")):
            assert sinks[name].wait().finish_reason == "length"
            expected = alone(request("x", (index + 1, 5), 20)).results()[0]
            assert sinks[name].token_ids == expected.token_ids
        assert engine.health().ready
        assert_baseline(engine, executor)


@pytest.mark.parametrize("how", ["unavailable", "failing"])
def test_a_dead_executor_fails_everything_and_refuses_more(how: str) -> None:
    engine, executor = make_engine(max_batch_size=2, failure_limit=3)
    with engine:
        sinks = [Recorder() for _ in range(8)]
        gate = Gate()
        executor.faults.before_step = gate
        for index, sink in enumerate(sinks):
            engine.submit(request(f"r{index}", (1, 2), None), sink)
        gate.wait_until_inside()
        if how == "unavailable":
            executor.faults.dead = True
        else:
            executor.faults.failing_steps = 1000
        gate.open.set()
        for sink in sinks:
            assert isinstance(sink.wait().error, EngineError | BackendUnavailableError)
        wait_until(lambda: engine.health().status == "dead")
        health = engine.health()
        assert not health.alive
        assert not health.ready
        assert health.message
        with pytest.raises(BackendUnavailableError, match="dead"):
            engine.submit(request("late", (1, 2)), Recorder())
        posted = threading.Event()
        assert engine.post(posted.set), "a dead engine still runs posted callables"
        assert posted.wait(WAIT)
    assert executor.closed


def test_a_broken_scheduler_kills_the_engine_and_hangs_nobody(monkeypatch) -> None:
    engine, _ = make_engine()
    with engine:
        scheduler = engine._stepper.scheduler

        def broken(*_args: object, **_kw: object) -> None:
            raise AssertionError("bug")

        monkeypatch.setattr(scheduler, "schedule", broken)
        monkeypatch.setattr(scheduler, "cancel", broken)
        sink = Recorder()
        engine.submit(request("a", (1, 2)), sink)
        assert isinstance(sink.wait().error, EngineError)
        wait_until(lambda: engine.health().status == "dead")


def test_deadline_ends_a_running_request() -> None:
    engine, executor = make_engine(FakeOptions(delay_seconds=0.002))
    with engine:
        with pytest.raises(DeadlineExceededError):
            list(engine.generate([1, 2], deadline_seconds=0.05))
        assert_baseline(engine, executor)


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


def test_sinks_hooks_and_posts_run_on_one_thread() -> None:
    seen: set[int] = set()
    engine, _ = make_engine(on_step_end=[lambda _report: seen.add(threading.get_ident())])
    with engine:
        engine.add_step_hook(lambda _report: seen.add(threading.get_ident()))
        done = threading.Event()
        engine.post(lambda: seen.add(threading.get_ident()))

        def sink(event) -> None:
            seen.add(threading.get_ident())
            if event.last:
                done.set()

        engine.submit(request("a", (1, 2)), sink)
        assert done.wait(WAIT)
    assert len(seen) == 1
    assert threading.get_ident() not in seen


def test_hooks_see_every_delivery_also_without_a_step() -> None:
    gate = Gate()
    delivered: list[int] = []
    engine, executor = make_engine(
        max_batch_size=1, on_step_end=[lambda report: delivered.append(report.events)]
    )
    executor.faults.before_step = gate
    with engine:
        sinks = [Recorder(), Recorder()]
        engine.submit(request("a", (1, 2)), sinks[0])
        gate.wait_until_inside()
        engine.submit(request("b", (1, 2)), sinks[1])
        engine.cancel("a")
        engine.cancel("b")
        gate.open.set()
        for sink in sinks:
            sink.wait()
        wait_until(lambda: sum(delivered) == 2)
    assert sum(delivered) == sum(len(sink.events) for sink in sinks)


def test_raising_hooks_and_posts_change_nothing() -> None:
    def broken(*_args: object) -> None:
        raise ValueError("bug in a hook")

    engine, executor = make_engine(on_step_end=[broken])
    with engine:
        engine.post(broken)
        assert len(list(engine.generate([1, 2], 3))) == 4
        assert_baseline(engine, executor)


def test_a_post_that_posts_itself_does_not_starve_the_steps() -> None:
    engine, _ = make_engine()
    with engine:

        def again() -> None:
            engine.post(again)

        engine.post(again)
        assert len(list(engine.generate([1, 2], 50))) == 51


def test_close_fails_open_requests_and_ends_the_threads() -> None:
    engine, executor = make_engine(SLOW, max_batch_size=2)
    sinks = [Recorder() for _ in range(5)]
    for index, sink in enumerate(sinks):
        engine.submit(request(f"r{index}", (1, 2), None), sink)
    stream = engine.stream(request("s", (1, 2), None))
    engine.close()
    for sink in sinks:
        assert isinstance(sink.wait().error, OverloadedError)
    assert isinstance(list(stream)[-1].error, OverloadedError)
    assert executor.closed
    wait_until(lambda: not engine_threads())
    assert engine.health().status == "stopped"
    with pytest.raises(OverloadedError):
        engine.submit(request("late", (1, 2)), Recorder())
    assert not engine.post(lambda: None)
    engine.close()  # idempotent


def test_close_drains_when_asked() -> None:
    gate = Gate()
    engine, executor = make_engine()
    executor.faults.before_step = gate
    sink = Recorder()
    engine.submit(request("a", (1, 2), 5), sink)
    gate.wait_until_inside()
    closer = threading.Thread(target=engine.close, args=(WAIT,))
    closer.start()
    wait_until(lambda: engine.health().status == "draining")
    with pytest.raises(OverloadedError, match="shutting down"):
        engine.submit(request("late", (1, 2)), Recorder())
    gate.open.set()
    assert sink.wait().finish_reason == "length"
    closer.join(WAIT)
    assert not closer.is_alive()
    assert executor.closed


def test_a_drain_ends_at_its_limit() -> None:
    clock = ManualClock()
    engine, _ = make_engine(SLOW, clock=clock)
    sink = Recorder()
    engine.submit(request("a", (1, 2), None), sink)
    closer = threading.Thread(target=engine.close, args=(5.0,))
    closer.start()
    wait_until(lambda: engine.health().status == "draining")
    seen = len(sink.events)
    wait_until(lambda: len(sink.events) > seen + 2, "it goes on while draining")
    clock.now += 6.0
    assert isinstance(sink.wait().error, OverloadedError)
    closer.join(WAIT)
    assert not closer.is_alive()


def test_an_idle_engine_closes_at_once_whatever_the_drain() -> None:
    engine, _ = make_engine()
    closer = threading.Thread(target=engine.close, args=(3600.0,))
    closer.start()
    closer.join(WAIT)
    assert not closer.is_alive()


def test_close_from_many_threads_and_from_the_engine_thread() -> None:
    engine, executor = make_engine()
    closers = [threading.Thread(target=engine.close) for _ in range(4)]
    engine.post(engine.close)
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(WAIT)
        assert not closer.is_alive()
    wait_until(lambda: executor.closed)


def test_a_dropped_engine_stops() -> None:
    engine, executor = make_engine()
    list(engine.generate([1, 2], 3))
    del engine
    gc.collect()
    wait_until(lambda: executor.closed, "closed by the collector")
    wait_until(lambda: not engine_threads())


def test_interpreter_exit_with_an_open_stream_is_clean() -> None:
    code = """
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.fake import FakeExecutor, FakeOptions
class Noisy(FakeExecutor):
    def close(self):
        super().close()
        print("closed", flush=True)
engine = UnifiedEngine(Noisy(FakeOptions(delay_seconds=0.01)))
print(next(engine.generate([1, 2, 3]))["type"], flush=True)
kept = engine.generate([1, 2, 3])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["token", "closed"]


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


def test_no_threads_are_left() -> None:
    gc.collect()
    wait_until(lambda: not engine_threads())
