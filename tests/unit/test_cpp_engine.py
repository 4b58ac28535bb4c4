"""CppEngineBackend: from execute requests to the engine's arrays and back."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("pocket_cpp_core", reason="the native module is not built")
pytest.importorskip("gguf", reason="tiny models are written with the gguf package")

from engine_driver import Driver, Part
from tiny_gguf import TinyLlama, write_gguf

from pocket_backend.api import (
    ConfigurationError,
    EngineArgs,
    EngineError,
    ModelLoadError,
    SamplingParams,
    UnsupportedFeatureError,
)
from pocket_backend.core.step import ExecuteRequest
from pocket_backend.executors.cpp_engine import CppEngineBackend
from pocket_backend.executors.cpp_options import CppEngineOptions
from pocket_backend.executors.executor_options import default_blocks
from pocket_backend.executors.memory import available_memory
from pocket_backend.executors.registry import create_executor

GREEDY = SamplingParams()
CONTEXT = 128
OPTIONS = {"max_batch_size": 4, "max_seq_len": CONTEXT, "num_blocks": 64, "max_batch_tokens": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, TinyLlama(weight_format="Q4_0", tied=False, tokenizer_tokens=320))
    return path


@pytest.fixture
def backend(model):
    backend = CppEngineBackend(model, OPTIONS)
    yield backend
    backend.close()


def request(tokens, slot=0, start=0, name=None, **kw):
    return ExecuteRequest(
        request_id=name or f"r{slot}",
        token_ids=tuple(tokens),
        slot_id=slot,
        is_prefill=len(tokens) > 1,
        sampling_params=kw.pop("params", GREEDY),
        start_position=start,
        **kw,
    )


def new(tokens, slot=0, blocks=None, **kw):
    ids = tuple(range(slot * 8, slot * 8 + 8)) if blocks is None else blocks
    return request(tokens, slot, is_new=True, block_ids=ids, **kw)


def expected_greedy(model, tokens, count):
    """The driver's own loop, over the ids that the tokenizer knows."""
    return Driver(model, context=CONTEXT).greedy(tokens, count, vocab=320)


def test_prefill_then_decode_equals_the_engine_alone(model, backend):
    prompts = [[1, 2, 3, 4, 5], [9] * 20, [300, 7]]
    expected = [expected_greedy(model, prompt, 6) for prompt in prompts]
    outputs = backend.execute_model([new(p, slot) for slot, p in enumerate(prompts)])
    texts = [[output.token_id] for output in outputs]
    for _ in range(5):
        step = [
            request([text[-1]], slot, len(prompts[slot]) + len(text) - 1)
            for slot, text in enumerate(texts)
        ]
        for text, output in zip(texts, backend.execute_model(step[::-1])[::-1], strict=True):
            assert output.finish_reason is None
            assert output.logprobs is None
            text.append(output.token_id)
    assert texts == expected


def test_mixed_chunks_and_decodes_in_one_step(model, backend):
    long = list(range(1, 61))
    expected = expected_greedy(model, long, 1)[0]
    decode = expected_greedy(model, [5, 6], 3)
    backend.execute_model([new([5, 6], slot=1)])
    first = backend.execute_model(
        [new(long[:25], slot=3, samples=False), request(decode[:1], slot=1, start=2)]
    )
    assert (first[0].token_id, first[0].finish_reason) == (None, None)
    assert first[1].token_id == decode[1]
    second = backend.execute_model(
        [request(decode[1:2], slot=1, start=3), request(long[25:], slot=3, start=25)]
    )
    assert [output.token_id for output in second] == [decode[2], expected]
    assert [output.request_id for output in second] == ["r1", "r3"]


def test_blocks_arrive_in_deltas(model, backend):
    tokens = list(range(40))
    expected = expected_greedy(model, tokens, 1)[0]
    backend.execute_model([new(tokens[:16], blocks=(63,), samples=False)])
    backend.execute_model([request(tokens[16:30], start=16, block_ids=(2,), samples=False)])
    [output] = backend.execute_model([request(tokens[30:], start=30, block_ids=(40,))])
    assert output.token_id == expected


def test_a_missing_block_fails_the_step_by_name(backend):
    backend.execute_model([new([1] * 16, blocks=(1,))])
    with pytest.raises(EngineError, match=r"block_tables\[0\]\[1\]: got -1"):
        backend.execute_model([request([1], start=16)])


def test_is_new_replaces_the_table_and_reset_forgets_it(model, backend):
    backend.execute_model([new([3] * 50, slot=2)])
    expected = expected_greedy(model, [8, 9], 1)[0]
    [output] = backend.execute_model([new([8, 9], slot=2, blocks=(60,), name="again")])
    assert output.token_id == expected
    with pytest.raises(EngineError, match=r"\[2\]\[1\]: got -1"):  # the old table is gone
        backend.execute_model([request([1], slot=2, start=16, name="again")])
    backend.reset_slot(2)
    with pytest.raises(EngineError, match="slot 2 does not hold request 'again'"):
        backend.execute_model([request([1], slot=2, start=2, name="again")])


def test_forks_copy_their_last_block(model, backend):
    prompt = list(range(20))
    backend.execute_model([new(prompt, slot=0, blocks=(0, 1))])
    fork = new([99], slot=1, blocks=(0, 50), block_copies=((1, 50),))
    fork = replace(fork, start_position=20)
    outputs = backend.execute_model([request([77], start=20), fork])
    assert outputs[0].token_id == expected_greedy(model, [*prompt, 77], 1)[0]
    assert outputs[1].token_id == expected_greedy(model, [*prompt, 99], 1)[0]


def test_sampling_follows_seed_and_index_whatever_the_neighbours(backend):
    params = SamplingParams(temperature=40.0, top_k=200)

    def draw(slot, seed, index):
        return new([1, 2, 3], slot, params=params, seed=seed, output_index=index)

    def tokens(*requests):
        return [output.token_id for output in backend.execute_model(list(requests))]

    alone = [tokens(draw(0, 42, 0))[0], tokens(draw(0, 42, 1))[0], tokens(draw(0, -1, 0))[0]]
    mixed = tokens(draw(3, -1, 0), new([4], 1), draw(2, 42, 1), draw(0, 42, 0))
    assert [mixed[3], mixed[2], mixed[0]] == alone
    assert len({tokens(draw(0, seed, 0))[0] for seed in range(20)}) > 10
    # The key is the seed modulo 2^64.
    assert tokens(draw(0, 2**64 - 1, 0))[0] == alone[2]


def test_tokens_stay_inside_the_tokenizer(backend):
    memory = backend.get_memory_info()
    assert memory.vocab_size == 320  # of 333 logits
    params = SamplingParams(temperature=100.0)
    for seed in range(100):
        [output] = backend.execute_model([new([seed], params=params, seed=seed)])
        assert output.token_id is not None
        assert output.token_id < 320


def test_extreme_but_valid_parameters_do_not_fail_the_step(backend):
    for params in (
        SamplingParams(temperature=1.0, top_p=1e-300),
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=100.0, top_k=2**31 - 1, min_p=1.0),
    ):
        [output] = backend.execute_model([new([1, 2], params=params)])
        assert output.token_id is not None


def test_logprob_of_the_chosen_token(model, backend):
    logits = Driver(model, context=CONTEXT).logits(Part([1, 2, 3], 0, 0))[0, :320]
    logits = logits.astype(np.float64)
    params = SamplingParams(logprobs=0)
    asked, plain = backend.execute_model([new([1, 2, 3], 0, params=params), new([1, 2, 3], 1)])
    expected = logits[asked.token_id] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert asked.logprobs.token_logprob == pytest.approx(expected, abs=1e-5)
    assert plain.logprobs is None
    assert plain.token_id == asked.token_id


def test_nan_fails_its_own_request_only(tmp_path):
    def poisoned(weights):
        weights["token_embd.weight"][5] = np.nan
        return weights

    path = tmp_path / "nan.gguf"
    write_gguf(path, TinyLlama(tied=False), change_tensors=poisoned)
    backend = CppEngineBackend(path, OPTIONS)
    good_alone = backend.execute_model([new([1, 2, 3], 1)])[0].token_id
    bad, good = backend.execute_model([new([4, 5, 6], 0), new([1, 2, 3], 1)])
    assert (bad.token_id, bad.finish_reason) == (None, "error")
    assert "NaN" in bad.error
    assert (good.token_id, good.finish_reason) == (good_alone, None)
    # The blocks that hold NaN are safe to hand to somebody else.
    [reused] = backend.execute_model([new([1, 2, 3], 0, name="next")])
    assert reused.token_id == good_alone


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([new([1]), new([2], name="x")], "repeated"),
        ([new([1], slot=4)], "from 0 to 3"),
        ([new([1], slot=-1)], "from 0 to 3"),
        ([new([1] * 97)], "97 tokens; at most 96"),
        ([replace(new([1] * 10), start_position=120)], "120 to 129.*128"),
        ([new([400])], r"token_ids\[0\]: got 400"),
        ([new([])], "sequence_offsets|token_ids"),
        ([new([1], blocks=tuple(range(9)))], "9 blocks; a context of 128 tokens has 8"),
        ([new([1], blocks=(64,))], "got 64; must be from 0 to 63"),
        ([request([1], name="ghost")], "does not hold request 'ghost'"),
        ([new([1], block_copies=((0, 99),))], r"copy_blocks: to\[0\]: got 99"),
    ],
)
def test_breaches_of_the_contract_fail_the_step(backend, requests, message):
    with pytest.raises(EngineError, match=message):
        backend.execute_model(requests)
    [output] = backend.execute_model([new([1, 2], 1, name="after")])
    assert output.token_id is not None


def test_an_empty_step_is_empty(backend):
    assert backend.execute_model([]) == []


def test_features(backend):
    for feature in ("batch_mode", "prefix_cache", "block_copies", "min_p", "min_tokens"):
        assert backend.supports_feature(feature)
    for feature in ("penalties", "logit_bias", "token_masks", "logprobs"):
        assert backend.supports_feature(feature)
    for feature in ("tensor_parallel", "swap", "nonsense"):
        assert not backend.supports_feature(feature)


def test_memory_info(model):
    backend = CppEngineBackend(model, {**OPTIONS, "kv_cache_dtype": "f32"})
    memory = backend.get_memory_info()
    assert (memory.num_blocks, memory.block_size, memory.max_slots) == (64, 16, 4)
    assert (memory.max_context, memory.max_batch_tokens) == (CONTEXT, 96)
    # 2 layers x 2 kv heads x K and V x 16 dims x 16 tokens x 4 bytes, 64 blocks
    assert memory.kv_cache_bytes == 2 * 2 * 2 * 16 * 16 * 4 * 64
    assert memory.weight_bytes > 0
    assert memory.workspace_bytes > 0


@pytest.mark.parametrize(("name", "found"), [("auto", "f16"), ("fp16", "f16"), ("bf16", "bf16")])
def test_16_bit_kv_types(model, name, found):
    backend = CppEngineBackend(model, {**OPTIONS, "kv_cache_dtype": name})
    assert backend.get_memory_info().kv_cache_bytes == 2 * 2 * 2 * 16 * 16 * 2 * 64
    assert backend.kv_dtype == found


def test_end_tokens_come_from_the_file(model, tmp_path, backend):
    assert backend.eos_token_ids == frozenset()
    path = tmp_path / "ends.gguf"
    ends = {"eos": 2, "eot": 7, "eom": 2}
    write_gguf(path, TinyLlama(tokenizer_tokens=10, end_tokens=ends))
    assert CppEngineBackend(path, OPTIONS).eos_token_ids == {2, 7}
    write_gguf(path, TinyLlama(tokenizer_tokens=10, end_tokens={"eos": 10}))
    with pytest.raises(ModelLoadError, match="eos_token_id: got 10; the tokenizer has 10 tokens"):
        CppEngineBackend(path, OPTIONS)


def test_from_args_and_the_registry(model):
    args = EngineArgs(
        model=str(model),
        max_model_len=64,
        max_batch_size=2,
        max_num_batched_tokens=32,
        kv_cache_tokens=640,
        kv_cache_dtype="f32",
        precision="f32",
        threads=1,
        backend_options={"isa": "scalar"},
    )
    for backend in (CppEngineBackend.from_args(args), create_executor(args)):
        memory = backend.get_memory_info()
        assert (memory.num_blocks, memory.max_slots, memory.max_context) == (40, 2, 64)
        assert backend.isa == "scalar"
        backend.close()


def test_a_directory_with_one_gguf_file(model, tmp_path):
    assert CppEngineBackend(model.parent, OPTIONS).get_memory_info().max_slots == 4
    with pytest.raises(ModelLoadError, match=r"holds neither config\.json nor a GGUF file"):
        CppEngineBackend(tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_batchsize": 4}, ConfigurationError, "unknown name 'max_batchsize'.*max_batch_size"),
        ({"max_batch_size": 0}, ConfigurationError, "max_batch_size: got 0"),
        ({"max_batch_size": True}, ConfigurationError, "max_batch_size: got True"),
        ({"max_seq_len": 513}, ConfigurationError, "max_seq_len: got 513.*512"),
        ({"kv_cache_dtype": "fp8"}, UnsupportedFeatureError, "kv_cache_dtype 'fp8'"),
        ({"kv_cache_dtype": "fp3"}, ConfigurationError, "kv_cache_dtype: got 'fp3'"),
        ({"precision": "bf16"}, ConfigurationError, "precision: got 'bf16'"),
        ({"isa": "sse2"}, ConfigurationError, "isa: got 'sse2'"),
        ({"num_blocks": 4, "kv_cache_tokens": 64}, ConfigurationError, "one of them"),
        ({"kv_cache_tokens": 15}, ConfigurationError, "kv_cache_tokens: got 15"),
    ],
)
def test_options_are_refused_by_name(model, options, error, message):
    with pytest.raises(error, match=message):
        CppEngineBackend(model, options)


def test_bad_models_are_load_errors(tmp_path, model):
    with pytest.raises(ModelLoadError, match=r"none\.gguf"):
        CppEngineBackend(tmp_path / "none.gguf", OPTIONS)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        CppEngineBackend(cut, OPTIONS)
    other = tmp_path / "other.gguf"
    write_gguf(other, TinyLlama(architecture="mamba9"))
    with pytest.raises(ModelLoadError, match="mamba9"):
        CppEngineBackend(other, OPTIONS)


def test_size_of_a_pool_that_nobody_specified():
    block = 1000
    assert default_blocks(2048, block, None) == 4 * 2048 // 16  # four contexts
    assert default_blocks(16384, block, None) == 32768 // 16  # 32k tokens
    assert default_blocks(131072, block, None) == 131072 // 16  # one context
    assert default_blocks(100, block, None) == 25
    assert default_blocks(16384, block, 1_000_000) == 400  # 40 % of what is available
    assert default_blocks(16384, block, 0) == 1
    assert CppEngineOptions(num_blocks=7).blocks(2048, block, None) == 7
    assert CppEngineOptions(kv_cache_tokens=100).blocks(2048, block, None) == 6


def test_available_memory_is_plausible():
    available = available_memory()
    assert available is None or 1 << 20 < available < 1 << 50


def test_python_overhead_of_a_decode_step(model):
    """The budget around the native call is 0.1 ms at 8 requests; ten times that on a slow machine
    still catches work per context token or per vocabulary entry. It is this thread's processor time
    that counts, which a busy machine does not lengthen.
    """
    backend = CppEngineBackend(model, {**OPTIONS, "max_batch_size": 8})
    backend.execute_model([new([1], slot) for slot in range(8)])
    steps = [request([1], slot, 1) for slot in range(8)]
    rows = np.zeros(8, dtype=np.int32)

    class Instant:
        def step(self, **_):
            return rows, rows

    backend._engine = Instant()
    best = min(_seconds(backend, steps) for _ in range(30))
    assert best < 1e-3


def _seconds(backend, steps):
    begin = time.thread_time()
    backend.execute_model(steps)
    return time.thread_time() - begin
