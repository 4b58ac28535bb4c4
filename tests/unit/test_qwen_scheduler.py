"""``QwenBatchScheduler``: the native scheduler's thread under Python."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

native = pytest.importorskip("pocket_cpp_core", reason="the native module is not built")
pytest.importorskip("gguf", reason="tiny models are written with the gguf package")

from tiny_gguf import TinyLlama, write_gguf  # noqa: E402

from pocket_backend.api import SamplingParams  # noqa: E402
from pocket_backend.engine.llm import LLM  # noqa: E402
from pocket_backend.engine.unified import UnifiedEngine  # noqa: E402
from pocket_backend.executors.cpp_engine import CppEngineBackend  # noqa: E402

WAIT_MS = 60_000
Sampling = native.QwenBatchSamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, TinyLlama(weight_format="Q8_0", tokenizer_tokens=300, end_tokens={"eos": 299}))
    return path


@pytest.fixture(scope="module")
def engine(model):
    options = native.QwenEngineOptions(max_batch_size=4, threads=1, prefill_chunk_tokens=32)
    return native.QwenEngine(model, options, max_context=256)


@pytest.fixture
def scheduler(engine) -> Iterator[native.QwenBatchScheduler]:
    with native.QwenBatchScheduler(engine, 4) as running:
        yield running
    assert engine.kv_free_blocks + engine.kv_cache_pinned_blocks == engine.kv_total_blocks


@pytest.fixture(scope="module")
def python_engine(model) -> Iterator[LLM]:
    backend = CppEngineBackend(
        model, {"threads": 1, "max_seq_len": 256, "max_batch_size": 4, "num_blocks": 64}
    )
    with UnifiedEngine(backend, max_batch_size=4) as engine:
        yield LLM(engine=engine)


class Counting(native.InferenceEngine):
    """Each token is the one before plus one; a gate holds every step up."""

    caps = native.Capabilities(max_slots=2)
    max_context = 1000

    def __init__(self) -> None:
        super().__init__()
        self.free = [0, 1]
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def allocate_slot(self) -> int | None:
        return self.free.pop() if self.free else None

    def free_slot(self, slot: int) -> None:
        self.free.append(slot)

    def batch_prefill(self, requests, token_budget):
        self.entered.set()
        assert self.gate.wait(60)
        results = [native.QwenForwardResult(top_token=r.prompt_tokens[-1] + 1) for r in requests]
        return native.BatchPrefillResult(results=results, incomplete=[False] * len(requests))

    def batch_decode_step(self, requests):
        if any(request.last_token == 500 for request in requests):
            raise ValueError("five hundred")
        return native.BatchDecodeResult(next_tokens=[r.last_token + 1 for r in requests])


def prompt_of(index: int) -> list[int]:
    start = index % 3
    return [(start + 7 * i) % 290 for i in range(3 + 17 * (index % 5))]


def test_outputs_are_those_of_the_python_engine(python_engine, scheduler) -> None:
    """Greedy and seeded, bit for bit, though prompts are chunked and blocks shared otherwise."""
    kinds = [
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 0},
        {"temperature": 1.2, "top_p": 1.0, "top_k": 7},
    ]
    params = [
        SamplingParams(max_tokens=3 + 2 * i, seed=i, ignore_eos=i % 2 == 0, **kinds[i % 3])
        for i in range(10)
    ]
    wanted = python_engine.generate([prompt_of(i) for i in range(10)], params)
    ids = [
        scheduler.submit_request(
            prompt_of(i),
            Sampling(max_new_tokens=3 + 2 * i, seed=i, ignore_eos=i % 2 == 0, **kinds[i % 3]),
        )
        for i in range(10)
    ]
    for request_id, expected in zip(ids, wanted, strict=True):
        result = scheduler.poll_result(request_id, timeout_ms=WAIT_MS)
        assert tuple(result.generated_tokens) == expected.token_ids
        assert result.finish_reason == expected.finish_reason
        assert result.prompt_tokens == expected.usage.prompt_tokens
        assert result.completion_tokens == len(expected.token_ids)
        assert 0 <= result.ttft_seconds <= result.total_seconds


def test_the_end_of_text_stops_as_in_the_python_engine(python_engine, scheduler) -> None:
    drawn = {"temperature": 30.0, "seed": 3}
    first = scheduler.submit_request(
        [1, 2, 3], Sampling(max_new_tokens=8, ignore_eos=True, **drawn)
    )
    tokens = scheduler.poll_result(first, WAIT_MS).generated_tokens
    index = next(i for i in range(1, 8) if tokens[i] not in tokens[:i])
    stop = tokens[index]
    second = scheduler.submit_request([1, 2, 3], Sampling(stop_token_ids=[stop], **drawn))
    result = scheduler.poll_result(second, WAIT_MS)
    [expected] = python_engine.generate(
        prompt_tokens=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=128, stop_token_ids=(stop,), **drawn),
    )
    assert (result.finish_reason, expected.finish_reason) == ("stop", "stop")
    assert tuple(result.generated_tokens) == expected.token_ids


def test_callbacks_get_tokens_and_the_result(scheduler) -> None:
    done = threading.Event()
    pairs: list[tuple[int, int]] = []
    singles: list[int] = []
    results = []

    def finished(result) -> None:
        results.append(result)
        if len(results) == 2:
            done.set()

    sampling = Sampling(max_new_tokens=5, ignore_eos=True)
    one = scheduler.submit_request(
        [1, 2],
        sampling,
        finished,
        on_token=lambda request_id, token: pairs.append((request_id, token)),
    )
    two = scheduler.submit_request([1, 2], sampling, callback=finished, on_token=singles.append)
    assert done.wait(60)
    by_id = {result.request_id: result for result in results}
    assert [token for _, token in pairs] == by_id[one].generated_tokens
    assert {request_id for request_id, _ in pairs} == {one}
    assert singles == by_id[two].generated_tokens


def test_a_raising_callback_is_reported_and_isolated(scheduler, monkeypatch) -> None:
    reported: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: reported.append(info.exc_value))

    def broken(*_: object) -> None:
        raise RuntimeError("mine")

    bad = scheduler.submit_request([1], Sampling(max_new_tokens=4), broken, broken)
    good = scheduler.submit_request([2], Sampling(max_new_tokens=4))
    assert len(scheduler.poll_result(bad, WAIT_MS).generated_tokens) == 4
    assert scheduler.poll_result(good, WAIT_MS).finish_reason == "length"
    scheduler.stop()
    assert [str(error) for error in reported] == ["mine", "mine"]
    assert scheduler.get_stats().callback_errors == 2


def test_polling_with_and_without_a_timeout() -> None:
    engine = Counting()
    engine.gate.clear()
    scheduler = native.QwenBatchScheduler(engine, 2)
    request = scheduler.submit_request([1], Sampling(max_new_tokens=3))
    assert scheduler.poll_result(request, timeout_ms=0) is None
    assert scheduler.poll_result(request, timeout_ms=5) is None
    engine.gate.set()
    assert scheduler.poll_result(request, timeout_ms=None).generated_tokens == [2, 3, 4]
    assert scheduler.poll_result(request).finish_reason == "length"  # again
    for bad in (0, 99):
        with pytest.raises(native.InvalidArgument, match=f"request_id: {bad} was never submitted"):
            scheduler.poll_result(bad)
    with pytest.raises(native.InvalidArgument, match="timeout_ms: got -1"):
        scheduler.poll_result(request, timeout_ms=-1)
    scheduler.stop()


def test_cancel_in_every_state() -> None:
    engine = Counting()
    engine.gate.clear()
    scheduler = native.QwenBatchScheduler(engine, 1)
    tokens: list[int] = []
    running = scheduler.submit_request([1], Sampling(max_new_tokens=900), on_token=tokens.append)
    assert engine.entered.wait(60)
    waiting = scheduler.submit_request([2])
    stats = scheduler.get_stats()
    assert stats.waiting_requests == 1
    assert scheduler.cancel_request(waiting)
    assert scheduler.cancel_request(running)
    assert not scheduler.cancel_request(running)
    engine.gate.set()
    for request in (running, waiting):
        assert scheduler.poll_result(request, WAIT_MS).finish_reason == "cancelled"
    assert tokens == []
    assert not scheduler.cancel_request(running)
    assert scheduler.get_stats().cancelled_requests == 2
    scheduler.stop()
    assert sorted(engine.free) == [0, 1]


def test_a_python_engine_may_fail_a_step() -> None:
    engine = Counting()
    with native.QwenBatchScheduler(engine, 1) as scheduler:
        bad = scheduler.submit_request([498], Sampling(max_new_tokens=9))
        good = scheduler.submit_request([1], Sampling(max_new_tokens=2))
        result = scheduler.poll_result(bad, WAIT_MS)
        assert result.finish_reason == "error"
        assert "five hundred" in result.error
        assert scheduler.poll_result(good, WAIT_MS).generated_tokens == [2, 3]
        assert scheduler.engine_caps().max_slots == 2


def test_a_subclass_without_methods_is_told_so() -> None:
    class Empty(native.InferenceEngine):
        pass

    with pytest.raises(native.InvalidArgument, match="does not define caps"):
        native.QwenBatchScheduler(Empty(), 1)


def test_stop_is_final_and_may_come_from_a_callback() -> None:
    engine = Counting()
    scheduler = native.QwenBatchScheduler(engine, 2)
    assert scheduler.is_running()
    first = scheduler.submit_request([1], Sampling(max_new_tokens=1), lambda _: scheduler.stop())
    assert scheduler.poll_result(first, WAIT_MS).finish_reason == "length"
    scheduler.stop()
    scheduler.stop()
    assert not scheduler.is_running()
    with pytest.raises(native.InvalidArgument, match="stopped"):
        scheduler.submit_request([1])


def test_limits_and_bad_requests(engine, scheduler) -> None:
    assert scheduler.max_batch_size == 4
    assert scheduler.prefill_token_budget == 32
    scheduler.set_prefill_token_budget(8)
    assert scheduler.prefill_token_budget == 8
    with pytest.raises(native.InvalidArgument, match="prefill_token_budget: got 33"):
        scheduler.prefill_token_budget = 33
    with pytest.raises(native.InvalidArgument, match="max_batch_size: got 5; must be from 1 to 4"):
        native.QwenBatchScheduler(engine, 5)
    for prompt, sampling, message in [
        ([], None, "prompt_tokens: got none"),
        ([300], None, r"prompt_tokens\[0\]: got 300"),
        ([1] * 256, None, "the context holds 256"),
        ([1], Sampling(max_new_tokens=0), "max_new_tokens: got 0"),
        ([1], Sampling(temperature=-1), "temperature"),
    ]:
        with pytest.raises(native.InvalidArgument, match=message):
            scheduler.submit_request(prompt, sampling)
    for bad in ({"callback": 1}, {"on_token": 1}):
        with pytest.raises(TypeError, match=next(iter(bad))):
            scheduler.submit_request([1], **bad)


def test_requests_share_the_beginning_of_their_prompts(engine, scheduler) -> None:
    engine.clear_prefix_cache()
    prompt = [(3 * i) % 200 for i in range(70)]
    sampling = Sampling(max_new_tokens=4, ignore_eos=True)
    first = scheduler.poll_result(scheduler.submit_request(prompt, sampling), WAIT_MS)
    second = scheduler.poll_result(scheduler.submit_request(prompt, sampling), WAIT_MS)
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)
    assert second.generated_tokens == first.generated_tokens
    stats = scheduler.get_stats()
    assert stats.reserved_blocks == 0
    assert stats.cache_pinned_blocks == 4
    assert stats.total_blocks == stats.free_blocks + 4


def test_threads_submit_and_poll_together(scheduler) -> None:
    failures: list[object] = []

    def client(start: int) -> None:
        for index in range(start, start + 6):
            request = scheduler.submit_request(
                prompt_of(index), Sampling(max_new_tokens=4, ignore_eos=True)
            )
            result = scheduler.poll_result(request, None)
            if len(result.generated_tokens) != 4:
                failures.append(result.error)

    threads = [threading.Thread(target=client, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_the_last_reference_may_be_dropped_by_a_callback() -> None:
    engine = Counting()
    holder = {"scheduler": native.QwenBatchScheduler(engine, 1)}
    dropped = threading.Event()

    def drop(_: object) -> None:
        del holder["scheduler"]
        gc.collect()
        dropped.set()

    holder["scheduler"].submit_request([1], Sampling(max_new_tokens=1), drop)
    assert dropped.wait(60)


SCRIPT = """
import sys
import pocketllm_cpp as native
sampling = native.QwenBatchSamplingParams(max_new_tokens=200, ignore_eos=True)
engine = native.QwenEngine(sys.argv[1], native.QwenEngineOptions(threads=1))
scheduler = native.QwenBatchScheduler(engine, 4)
requests = [scheduler.submit_request([1, 2], sampling, print, lambda t: None) for _ in range(8)]
print("submitted")
"""


def test_a_script_may_end_while_requests_run(model) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("submitted")
