"""``PyTorchBackend`` as an executor: loading, text, forks, isolation, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver
from tiny_checkpoints import (
    CONTEXT,
    TOKENIZER_SIZE,
    VOCAB,
    Checkpoint,
    write_checkpoint,
    write_tokenizer,
)
from tiny_gguf import TinyLlama, write_gguf

from pocket_backend.api import (
    ConfigurationError,
    EngineArgs,
    EngineError,
    ModelLoadError,
    SamplingParams,
    UnsupportedFeatureError,
)
from pocket_backend.core.step import ExecuteOutput, ExecuteRequest
from pocket_backend.engine.llm import LLM
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors import registry
from pocket_backend.executors.registry import choose_backend, resolve_backend
from pocket_backend.executors.torch_engine import PyTorchBackend

pytestmark = pytest.mark.parity

OPTIONS = {"max_batch_size": 4, "max_batch_tokens": 64, "num_blocks": 32}
PROMPT = [5, 17, 200, 17, 5, 40, 99, 8, 71, 23, 150, 4, 61, 88, 30, 12, 254, 77]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def backend(llama: Checkpoint) -> Iterator[PyTorchBackend]:
    backend = PyTorchBackend(llama.path, OPTIONS)
    yield backend
    backend.close()


def chunk(tokens: list[int], start: int = 0, slot: int = 0, **fields: Any) -> ExecuteRequest:
    """A part of a sequence in ``slot``, whose blocks are 4 * slot .. 4 * slot + 3."""
    values: dict[str, Any] = {
        "sampling_params": SamplingParams(),
        "start_position": start,
        "is_new": start == 0,
        "block_ids": tuple(range(4 * slot, 4 * slot + 4)) if start == 0 else (),
    }
    return ExecuteRequest(
        f"r{slot}", tuple(tokens), slot, is_prefill=len(tokens) > 1, **(values | fields)
    )


def only(outputs: Any) -> ExecuteOutput:
    [output] = outputs
    return output


def test_llm_serves_text_from_a_directory(tmp_path: Path) -> None:
    llama = write_checkpoint(tmp_path, "llama", seed=3)
    write_tokenizer(tmp_path)
    args = EngineArgs(model=str(tmp_path), backend="torch", kv_cache_tokens=1024, threads=1)
    with LLM(args) as llm:
        assert llm.engine.memory_info.vocab_size == TOKENIZER_SIZE < VOCAB
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        results = llm.generate(["Hello there", "a"], params)
        for text, result in zip(["Hello there", "a"], results, strict=True):
            ids = llm.tokenizer.encode(text)
            tokens = list(result.token_ids)
            with torch.no_grad():
                logits = llama.model(torch.tensor([ids + tokens[:-1]])).logits[0]
            expected = logits[len(ids) - 1 :, :TOKENIZER_SIZE].argmax(dim=1).tolist()
            assert tokens == expected
            assert result.text == llm.tokenizer.decode(tokens)


def test_gguf_file(tmp_path: Path) -> None:
    """Also that the logits of ids beyond the file's tokenizer are cut off."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, TinyLlama(weight_format="Q8_0", tied=False, tokenizer_tokens=300))
    driver = Driver(path, context=128, precision="f32", kv_dtype="f32")
    backend = PyTorchBackend(path, OPTIONS)
    assert backend.get_memory_info().vocab_size == 300
    output = [only(backend.execute_model([chunk(PROMPT)])).token_id]
    while len(output) < 12:
        step = chunk(output[-1:], start=len(PROMPT) + len(output) - 1)
        output.append(only(backend.execute_model([step])).token_id)
    assert output == driver.greedy(PROMPT, 12, vocab=300)
    backend.close()


@pytest.mark.slow
def test_smollm2_is_transformers_and_the_cpp_engine(smollm2: Any) -> None:
    args = EngineArgs(
        model=str(smollm2.path), backend="torch", max_model_len=256, kv_cache_tokens=1024
    )
    questions = ["What is the capital of France?", "List three colours."]
    prompts = [smollm2.chat(question) for question in questions]
    with LLM(args) as llm:
        results = llm.generate(prompts, SamplingParams(max_tokens=24))
        assert results[0].text.startswith("The capital of France is Paris.")
    for prompt, result in zip(prompts, results, strict=True):
        tokens = list(result.token_ids)
        reference = smollm2.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        assert tokens == reference.argmax(axis=1).tolist()
        exact = Driver(smollm2.path, context=256, precision="f32", kv_dtype="f32")
        assert tokens == exact.greedy(prompt, len(tokens))


def test_forks_continue_alike_and_apart(llama: Checkpoint, backend: PyTorchBackend) -> None:
    engine = UnifiedEngine(backend, max_total_tokens=1 << 20)
    try:
        llm = LLM(engine=engine)
        expected = llama.greedy(PROMPT, 10)
        greedy = llm.generate([PROMPT], SamplingParams(max_tokens=10, n=3, ignore_eos=True))
        assert [list(result.token_ids) for result in greedy] == [expected] * 3
        drawn = SamplingParams(max_tokens=10, n=3, ignore_eos=True, temperature=1.5, seed=4)
        once = [result.token_ids for result in llm.generate([PROMPT], drawn)]
        again = [result.token_ids for result in llm.generate([PROMPT[:9], PROMPT], drawn)][3:]
        assert once == again
        assert len(set(once)) == 3
    finally:
        engine.close()


def test_blocks_are_copied_before_the_step(backend: PyTorchBackend) -> None:
    asks = {"sampling_params": SamplingParams(logprobs=0)}

    def logprob(request: ExecuteRequest) -> float:
        report = only(backend.execute_model([request])).logprobs
        assert report is not None
        return report.token_logprob

    last = len(PROMPT) - 1
    whole = logprob(chunk(PROMPT, **asks))
    backend.execute_model([chunk(PROMPT[:-1], slot=1)])
    # A fork of slot 1: block 4 is shared, the partly filled block 5 is copied to 9.
    fork = {"start": last, "slot": 2, "is_new": True, "block_ids": (4, 9)} | asks
    copied = logprob(chunk(PROMPT[last:], block_copies=((5, 9),), **fork))
    assert copied == pytest.approx(whole, abs=1e-5)
    # Without the copy it would not have been so.
    backend.execute_model([chunk(PROMPT[::-1], slot=3, block_ids=(12, 9, 14, 15))])
    assert abs(logprob(chunk(PROMPT[last:], **fork)) - whole) > 1e-3


def test_nan_left_in_a_block_does_not_reach_its_next_owner(backend: PyTorchBackend) -> None:
    clean = only(backend.execute_model([chunk(PROMPT)]))
    for blocks in backend._storage._blocks.values():
        blocks.fill_(float("nan"))
    # A chunk, then a decode beside another sequence: both read whole blocks.
    backend.execute_model([chunk(PROMPT[:-1])])
    last = chunk(PROMPT[-1:], start=len(PROMPT) - 1)
    outputs = backend.execute_model([last, chunk(PROMPT, slot=1)])
    assert [output.token_id for output in outputs] == [clean.token_id] * 2


def test_a_broken_sequence_fails_alone(tmp_path: Path) -> None:
    llama = write_checkpoint(tmp_path, "qwen3", tie_word_embeddings=False)
    with torch.no_grad():
        llama.model.get_input_embeddings().weight[7] = float("nan")
    llama.model.save_pretrained(tmp_path)
    backend = PyTorchBackend(tmp_path, OPTIONS)
    good = only(backend.execute_model([chunk(PROMPT)]))
    first, second = backend.execute_model([chunk([5, 7, 9], slot=1), chunk(PROMPT)])
    assert (first.token_id, first.finish_reason) == (None, "error")
    assert "NaN" in str(first.error)
    assert second == good
    backend.close()


def test_memory_is_sized_and_reported(llama: Checkpoint) -> None:
    backend = PyTorchBackend(llama.path, {"max_seq_len": 64, "kv_cache_tokens": 320})
    memory = backend.get_memory_info()
    assert (memory.num_blocks, memory.block_size, memory.max_context) == (20, 16, 64)
    assert memory.kv_cache_bytes == 320 * 2 * 2 * 32 * 4  # tokens, layers, K and V, width, float32
    assert memory.weight_bytes == sum(p.nbytes for p in llama.model.parameters())
    assert backend.eos_token_ids == {2}
    backend.close()
    default = PyTorchBackend(llama.path)
    assert default.get_memory_info().max_context == CONTEXT
    assert default.get_memory_info().num_blocks == 4 * CONTEXT // 16
    default.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_runs(llama: Checkpoint, dtype: str) -> None:
    backend = PyTorchBackend(llama.path, OPTIONS | {"torch_dtype": dtype})
    exact = PyTorchBackend(llama.path, OPTIONS)
    assert backend.get_memory_info().kv_cache_bytes * 2 == exact.get_memory_info().kv_cache_bytes
    logprobs = SamplingParams(logprobs=0)
    got, wanted = (
        only(b.execute_model([chunk(PROMPT, sampling_params=logprobs)])).logprobs
        for b in (backend, exact)
    )
    assert got is not None
    assert wanted is not None
    assert got.token_logprob == pytest.approx(wanted.token_logprob, abs=0.1)
    backend.close()
    exact.close()


def test_broken_contracts_fail_the_step(backend: PyTorchBackend) -> None:
    def fails(match: str, *requests: ExecuteRequest) -> None:
        with pytest.raises(EngineError, match=match):
            backend.execute_model(requests)

    fails("repeated", chunk([5]), chunk([6]))
    fails("not from 0 to 3", chunk([5], slot=4))
    fails("65 tokens", chunk([5] * 65))
    fails("does not hold", chunk([5], start=3))
    fails("do not fit the context", chunk([5], start=CONTEXT, is_new=True))
    fails("beyond its 1 blocks", chunk([5] * 17, block_ids=(3,)))
    fails("block ids", chunk([5], block_ids=(32,)))
    fails("block copies", chunk([5], block_copies=((0, 32),)))
    with pytest.raises(EngineError, match="below 4"):
        backend.reset_slot(4)
    assert backend.execute_model([]) == []
    backend.close()
    fails("after close", chunk([5]))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"wings": 2}, ConfigurationError, "wings"),
        ({"dtype": "int3"}, ConfigurationError, "int3"),
        ({"dtype": "float32", "torch_dtype": "float32"}, ConfigurationError, "not both"),
        ({"max_seq_len": 257}, ConfigurationError, "256"),
        ({"device": "abacus"}, ConfigurationError, "abacus"),
        ({"kv_cache_dtype": "int8"}, UnsupportedFeatureError, "int8"),
        ({"num_blocks": 3, "kv_cache_tokens": 64}, ConfigurationError, "not both"),
        ({"max_batch_size": 0}, ConfigurationError, "max_batch_size"),
        ({"trust_remote_code": "yes"}, ConfigurationError, "trust_remote_code"),
    ],
)
def test_options_are_checked(
    llama: Checkpoint, options: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        PyTorchBackend(llama.path, options)


def test_auto_takes_what_the_cpp_engine_does_not_run(tmp_path: Path, llama: Checkpoint) -> None:
    choice = choose_backend(EngineArgs(model=str(llama.path)))
    assert (choice.name, choice.reason) == ("cpp", "the model is a Hugging Face directory")
    gemma = write_checkpoint(tmp_path, "gemma2")
    choice = choose_backend(EngineArgs(model=str(gemma.path)))
    assert choice.name == "torch"
    assert "gemma2" in choice.reason
    assert resolve_backend(EngineArgs(model=str(gemma.path))) == "torch"
    assert choose_backend(EngineArgs(model="m", backend="cpp")).reason == "asked for by name"


def test_auto_without_torch_lets_the_cpp_engine_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _config(tmp_path, model_type="mine")
    monkeypatch.setattr(registry, "_TORCH_PACKAGES", ("no_such_package",))
    args = EngineArgs(model=str(tmp_path))
    assert "not installed" in choose_backend(args).reason
    with pytest.raises(ModelLoadError, match="mine"):
        registry.create_executor(args)


def _config(path: Path, **fields: object) -> Path:
    (path / "config.json").write_text(json.dumps(fields))
    return path


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    def fails(path: Path, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            PyTorchBackend(path)

    fails(tmp_path / "nowhere", ModelLoadError, "nowhere")
    fails(tmp_path, ModelLoadError, "neither config.json nor")
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    fails(tmp_path, ModelLoadError, "not a GGUF file")
    fails(_config(tmp_path, model_type="no_such_model"), ModelLoadError, "no_such_model")
    (tmp_path / "config.json").write_text("[")
    fails(tmp_path, ModelLoadError, "config.json")
    fails(_config(tmp_path, model_type="llama"), ModelLoadError, "Transformers cannot load")


def test_code_in_the_directory_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    _config(tmp_path, model_type="mine", auto_map={"AutoConfig": "mine.C",
                                                   "AutoModelForCausalLM": "mine.M"})  # fmt: skip
    with pytest.raises(ModelLoadError, match="custom code"):
        PyTorchBackend(tmp_path)


def test_other_layers_are_refused_by_name(tmp_path: Path) -> None:
    import transformers

    config = transformers.RwkvConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16
    )
    transformers.RwkvForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="rwkv has layers of the kind recurrent"):
        PyTorchBackend(tmp_path)
