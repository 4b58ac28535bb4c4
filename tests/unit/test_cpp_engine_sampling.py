"""Sampling options of the C++ executor against a slow numpy reference, row by row.

The logits come from the engine itself (``Driver``), so what is compared is everything after them.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pocket_cpp_core", reason="the native module is not built")
pytest.importorskip("gguf", reason="tiny models are written with the gguf package")

from engine_driver import Driver, Part
from sampling_cases import CASES, EOS, PROMPT, VOCAB
from sampling_reference import choose, log_softmax, processed
from tiny_gguf import TinyLlama, write_gguf

from pocket_backend.api import EngineError, InvalidRequestError, SamplingParams
from pocket_backend.core.step import ExecuteRequest
from pocket_backend.executors.cpp_engine import CppEngineBackend
from pocket_backend.executors.cpp_sampling import allowed_words

CONTEXT = 128
BLOCKS = CONTEXT // 16
OPTIONS = {"max_batch_size": 8, "max_seq_len": CONTEXT, "num_blocks": 64, "max_batch_tokens": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, TinyLlama(weight_format="Q4_0", tied=False, tokenizer_tokens=VOCAB))
    return path


@pytest.fixture
def backend(model):
    backend = CppEngineBackend(model, OPTIONS)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def driver(model):
    return Driver(model, context=CONTEXT)


def start(params, slot=0, output=(), seed=7, prompt=PROMPT, cached=0):
    """The request of a sequence that enters its slot (again) with ``output`` so far."""
    known = [*prompt, *output]
    return ExecuteRequest(
        request_id=f"r{slot}",
        token_ids=tuple(known[cached:]),
        slot_id=slot,
        is_prefill=True,
        sampling_params=params,
        start_position=cached,
        is_new=True,
        block_ids=tuple(range(slot * BLOCKS, slot * BLOCKS + BLOCKS)),
        output_index=len(output),
        seed=seed,
        known_tokens=known if params.has_penalties else None,
        ending_ids=EOS if params.min_tokens else frozenset(),
    )


def decode(params, output, slot=0, seed=7, prompt=PROMPT):
    return ExecuteRequest(
        request_id=f"r{slot}",
        token_ids=(output[-1],),
        slot_id=slot,
        is_prefill=False,
        sampling_params=params,
        start_position=len(prompt) + len(output) - 1,
        output_index=len(output),
        seed=seed,
    )


def generate(backend, params, count, slot=0, seed=7, prompt=PROMPT):
    output = []
    for index in range(count):
        request = (
            decode(params, output, slot, seed, prompt)
            if index
            else start(params, slot, seed=seed, prompt=prompt)
        )
        [result] = backend.execute_model([request])
        assert result.finish_reason is None, result.error
        output.append(result.token_id)
    return output


@pytest.mark.parametrize("name", CASES)
def test_every_token_is_the_one_that_the_reference_draws(backend, driver, name):
    params = CASES[name]
    output = generate(backend, params, 24)
    for index, token in enumerate(output):
        logits = driver.logits(Part([*PROMPT, *output[:index]], 0, 0))[0, :VOCAB]
        row = processed(logits, params, PROMPT, output[:index], EOS)
        assert token in choose(row, params, 7, index), index


def test_the_cases_make_a_difference(backend):
    outputs = {name: generate(backend, params, 24) for name, params in CASES.items()}
    plain = outputs.pop("plain")
    assert plain not in outputs.values()
    assert outputs["repetition"] != outputs["encouraged repetition"]
    assert outputs["bias"] != outputs["bias and penalty"]
    below_float32 = generate(backend, SamplingParams(repetition_penalty=1e-300), 24)
    assert below_float32 == outputs["tiny repetition"]


def test_batches_change_nothing(backend):
    """All cases side by side, eight at a time, in changing slots and orders."""
    alone = {name: generate(backend, params, 12) for name, params in CASES.items()}
    names = list(CASES)
    for shift in range(3):
        group = [names[(shift * 5 + i) % len(names)] for i in range(8)]
        outputs = {name: [] for name in group}
        for index in range(12):
            step = [
                decode(CASES[name], outputs[name], slot) if index else start(CASES[name], slot)
                for slot, name in enumerate(group)
            ]
            order = step[shift:] + step[:shift]
            for request, result in zip(order, backend.execute_model(order), strict=True):
                outputs[group[request.slot_id]].append(result.token_id)
        assert outputs == {name: alone[name] for name in group}


@pytest.mark.parametrize("name", ["all penalties", "everything", "min tokens"])
def test_a_sequence_that_starts_again_continues_alike(backend, name):
    """Preempted after any token, into another slot, with and without a cached prefix."""
    params = CASES[name]
    whole = generate(backend, params, 14)
    for cut in (1, 3, 6, 13):
        for cached in (0, 5):
            output = whole[:cut]
            if cached:  # the slot's blocks hold the prefix, somebody else's penalties
                generate(backend, CASES["frequency"], 1, slot=3)
            requests = [start(params, 3, output, cached=cached)]
            while True:
                [result] = backend.execute_model(requests)
                output = [*output, result.token_id]
                if len(output) == len(whole):
                    break
                requests = [decode(params, output, 3)]
            assert output == whole, (cut, cached)


def test_chunked_prompts_count_once(backend):
    params = CASES["all penalties"]
    whole = generate(backend, params, 6)
    first = start(params, 1)
    first.token_ids, first.samples = PROMPT[:3], False
    backend.execute_model([first])
    second = decode(params, [PROMPT[-1]], 1)
    second.token_ids, second.start_position, second.output_index = PROMPT[3:], 3, 0
    [result] = backend.execute_model([second])
    output = [result.token_id]
    while len(output) < 6:
        [result] = backend.execute_model([decode(params, output, 1)])
        output.append(result.token_id)
    assert output == whole


def test_a_step_that_failed_and_runs_again_counts_once(backend):
    params = CASES["all penalties"]
    whole = generate(backend, params, 6)
    output = generate(backend, params, 3)
    with pytest.raises(EngineError):
        backend.execute_model([decode(params, output), start(CASES["plain"], 1, prompt=(400,))])
    [result] = backend.execute_model([start(params, 0, output)])
    assert result.token_id == whole[3]


def test_slots_do_not_inherit(backend):
    plain = generate(backend, CASES["plain"], 8)
    generate(backend, CASES["everything"], 8)
    assert generate(backend, CASES["plain"], 8) == plain
    generate(backend, CASES["allowed ids"], 2)
    backend.reset_slot(0)
    assert generate(backend, CASES["plain"], 8) == plain


def test_logprobs_are_of_the_raw_logits(backend, driver):
    for name in ("plain", "everything"):
        params = SamplingParams(**{**_fields(CASES[name]), "logprobs": 20})
        neighbour = start(CASES["plain"], 1)
        output = []
        for index in range(6):
            request = decode(params, output) if index else start(params)
            step = [request, neighbour] if index == 0 else [request]
            result, *rest = backend.execute_model(step)
            assert all(other.logprobs is None for other in rest)
            logits = driver.logits(Part([*PROMPT, *output], 0, 0))[0, :VOCAB]
            expected = log_softmax(logits)
            assert result.logprobs.token_logprob == pytest.approx(
                expected[result.token_id], abs=1e-5
            )
            best = np.lexsort((np.arange(VOCAB), -logits))[:20]
            assert list(result.logprobs.top) == best.tolist()
            np.testing.assert_allclose(
                list(result.logprobs.top.values()), expected[best], atol=1e-5
            )
            output.append(result.token_id)


def _fields(params):
    return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-38, 0.0])
def test_s13_tiny_temperatures_are_greedy_beside_sampled_and_banned_rows(backend, temperature):
    tiny = SamplingParams(temperature=temperature)
    greedy = generate(backend, SamplingParams(temperature=0.0), 12)
    others = [CASES["truncated"], CASES["bad ids"], SamplingParams(bad_token_ids=tuple(greedy))]
    expected = [greedy, *(generate(backend, params, 12) for params in others)]
    outputs = [[] for _ in expected]
    for index in range(12):
        step = [
            decode(params, outputs[slot], slot) if index else start(params, slot)
            for slot, params in enumerate([tiny, *others])
        ]
        for request, result in zip(step, backend.execute_model(step), strict=True):
            assert result.finish_reason is None, result.error
            outputs[request.slot_id].append(result.token_id)
    assert outputs == expected


def test_a_row_with_nothing_allowed_fails_alone(backend):
    impossible = SamplingParams(allowed_token_ids=(2, 9), min_tokens=1)
    bad, good = backend.execute_model([start(impossible, 0), start(CASES["plain"], 1)])
    assert (bad.token_id, bad.finish_reason) == (None, "error")
    assert "no token may come next" in bad.error
    assert good.token_id == generate(backend, CASES["plain"], 1)[0]


def test_nan_fails_its_row_only_with_options(tmp_path):
    """One poisoned prompt; the NaN reaches masked, banned and allowed ids."""

    def poisoned(weights):
        weights["token_embd.weight"][5] = np.nan
        return weights

    path = tmp_path / "nan.gguf"
    write_gguf(path, TinyLlama(tied=False, tokenizer_tokens=VOCAB), change_tensors=poisoned)
    backend = CppEngineBackend(path, OPTIONS)
    names = ["everything", "bad ids", "allowed ids", "all penalties"]
    good = {name: start(CASES[name], slot, prompt=(1, 2)) for slot, name in enumerate(names)}
    expected = [output.token_id for output in backend.execute_model(list(good.values()))]
    bad = [start(CASES[name], slot + 4, prompt=(1, 5)) for slot, name in enumerate(names)]
    outputs = backend.execute_model([*good.values(), *bad])
    assert [output.token_id for output in outputs[:4]] == expected
    for output in outputs[4:]:
        assert output.finish_reason == "error"
        assert "NaN" in output.error


def test_penalties_without_the_known_tokens_are_a_broken_contract(backend):
    request = start(CASES["frequency"])
    request.known_tokens = None
    with pytest.raises(EngineError, match="need known_tokens"):
        backend.execute_model([request])
    backend.execute_model([start(CASES["frequency"])])
    late = decode(CASES["frequency"], [1, 2, 3])
    with pytest.raises(EngineError, match="tokens 6 to 7 never came"):
        backend.execute_model([late])


def test_masks():
    assert allowed_words([0, 31, 33], 40).tolist() == [-(2**31) + 1, 2]
    assert allowed_words([], 33).tolist() == [0, 0]
    words = allowed_words(range(64), 64)
    assert (words.dtype, words.tolist()) == (np.int32, [-1, -1])


def test_parameters_are_checked():
    for field in ("bad_token_ids", "allowed_token_ids"):
        for value in ((-1,), (2**31,), "ab", 5, (True,), (1.5,)):
            with pytest.raises(InvalidRequestError, match=field):
                SamplingParams(**{field: value})
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=())
    with pytest.raises(InvalidRequestError, match="bad_token_ids does not"):
        SamplingParams(allowed_token_ids=(1, 2), bad_token_ids=(2, 1, 3))
    assert SamplingParams(bad_token_ids=[4]).bad_token_ids == (4,)
