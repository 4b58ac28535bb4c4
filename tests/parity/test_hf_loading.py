"""Hugging Face directories as files: what is loaded, what is refused, and by which message."""

from __future__ import annotations

import json
import shutil

import ggml_quants
import numpy as np
import pytest
import torch
from engine_driver import Driver
from safetensors.torch import load_file, save_file
from tiny_gguf import TinyLlama, write_gguf
from tiny_hf import CONTEXT, VOCAB, edit_config, logits_of, random_tokens, save, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import pocket_cpp_core
from pocket_backend.api import EngineArgs, ModelLoadError
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.cpp_engine import CppEngineBackend

pytestmark = pytest.mark.parity

TOKENS = random_tokens(40)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("LlamaConfig")


@pytest.fixture
def directory(tmp_path, llama):
    return save(llama, tmp_path / "tiny-llama")


def logits(path, **options) -> np.ndarray:
    settings = {"precision": "f32", "kv_dtype": "f32"} | options
    return Driver(path, context=CONTEXT, **settings).all_logits(TOKENS)


def refused(path) -> str:
    with pytest.raises(pocket_cpp_core.EngineError) as caught:
        logits(path)
    return str(caught.value)


def edit_tensors(directory, change) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


# --- L1: tied and untied embeddings ----------------------------------------------------------


def test_l1_tied_and_absent_shares_the_embedding(tmp_path):
    model = tiny_model("LlamaConfig", tie_word_embeddings=True)
    path = save(model, tmp_path)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    assert np.abs(logits(path) - logits_of(model, TOKENS)).max() < 2e-4


def test_l1_tied_and_present_ignores_the_head(tmp_path):
    model = tiny_model("LlamaConfig", tie_word_embeddings=True)
    path = save(model, tmp_path)
    edit_tensors(path, lambda tensors: tensors | {"lm_head.weight": torch.randn(VOCAB, 64)})
    assert np.abs(logits(path) - logits_of(model, TOKENS)).max() < 2e-4


def test_l1_untied_and_present_uses_the_head(directory, llama):
    assert np.abs(logits(directory) - logits_of(llama, TOKENS)).max() < 2e-4


def test_l1_untied_and_absent_is_an_error_that_names_the_tensor(directory):
    edit_tensors(
        directory, lambda tensors: {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    )
    message = refused(directory)
    assert "lm_head.weight is missing" in message
    assert "tie_word_embeddings" in message


# --- L2: shards -------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path, llama):
    path = save(llama, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def test_sharded_equals_single(directory, sharded):
    assert np.array_equal(logits(directory), logits(sharded))


def test_l2_truncated_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1000)
    message = refused(sharded)
    assert shard.name in message
    assert "tensor '" in message
    assert "truncated by at least 1000 bytes" in message


def test_l2_missing_shard(sharded):
    shard = min(sharded.glob("*.safetensors"))
    shard.unlink()
    message = refused(sharded)
    assert f"'{shard.name}' is missing" in message


def test_l2_stale_index(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    tensor = "model.norm.weight"
    del content["weight_map"][tensor]
    index.write_text(json.dumps(content))
    assert f"'{tensor}': the index names no shard for it" in refused(sharded)


def test_l2_empty_tensors_are_accepted(directory, llama):
    edit_tensors(directory, lambda tensors: tensors | {"leftover": torch.empty(0, 64)})
    assert np.abs(logits(directory) - logits_of(llama, TOKENS)).max() < 2e-4


def test_a_tensor_that_nobody_computes_is_refused_by_its_own_name(directory):
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(directory, lambda tensors: tensors | {name: torch.zeros(64)})
    assert "blk.0.attn_q.bias" in refused(directory)
    edit_tensors(directory, lambda tensors: tensors | {"adapter.weight": torch.zeros(64)})
    assert "'adapter.weight' is not part of a llama model" in refused(directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type: got 'gpt2'; supported are gemma3_text, llama, mistral, mixtral, qwen2, ",
        ),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is a string, must be an integer"),
        ({"vocab_size": 999}, "vocab_size is 999 but token_embd.weight has 333 rows"),
        ({"hidden_act": "relu"}, "hidden_act: got 'relu'; supported is silu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised by 'fp8'"),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2}},
            "rope_type: got 'longrope'; supported are default, linear, llama3 and yarn",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor of the yarn RoPE is missing"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}},
            "give a frequency factor of",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e300}},
            "give a magnitude of",
        ),
        ({"partial_rotary_factor": -1}, "partial_rotary_factor: got -1.000000; must be above 0"),
        ({"partial_rotary_factor": 1e30}, "must be above 0 and at most 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id is a string"),
    ],
)
def test_configurations_that_are_refused(directory, fields, message):
    edit_config(directory, **fields)
    assert message in refused(directory)


def test_no_model_in_the_directory(tmp_path):
    assert "holds neither config.json nor a GGUF file" in refused(tmp_path)
    with pytest.raises(ModelLoadError, match=r"holds neither config\.json nor a GGUF file"):
        UnifiedEngine.from_args(EngineArgs(model=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not valid JSON at byte 1" in refused(tmp_path)


# --- quantised while loading ------------------------------------------------------------------


ENDS = {"token_embd.weight": "Q8_0", "output.weight": "Q8_0"}


def check_quantised(folder, weights, kind, **sizes) -> None:
    """Bit for bit: floats quantised at load, and a GGUF file with blocks of ``kind``."""
    floats, blocks = folder / "floats.gguf", folder / "blocks.gguf"
    write_gguf(floats, TinyLlama(tied=False, head_dim=32, **sizes))
    write_gguf(blocks, TinyLlama(tied=False, head_dim=32, weight_format=kind, **sizes),
               formats=ENDS)  # fmt: skip
    for precision in ("int8", "f32"):
        expected = logits(blocks, precision=precision)
        assert np.array_equal(logits(floats, weights=weights, precision=precision), expected)
    assert not np.array_equal(logits(floats), logits(blocks))


@pytest.mark.parametrize("weights", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_quantising_at_load_equals_a_quantised_file(tmp_path, weights):
    """Whose blocks the gguf package made from the same floats."""
    check_quantised(tmp_path, weights, weights.upper(), hidden=128)


@pytest.mark.parametrize("weights", ["q4_k", "q5_k", "q6_k"])
def test_k_quants_at_load_equal_a_file_of_their_blocks(tmp_path, monkeypatch, weights):
    """Which hold what tests/property/test_quantise.py says of them."""
    monkeypatch.setattr(
        ggml_quants,
        "quantize",
        lambda rows, kind: pocket_cpp_core.quantize_rows(np.ascontiguousarray(rows), kind.lower()),
    )
    check_quantised(tmp_path, weights, weights.upper(), hidden=256, heads=8, ffn=256)


@pytest.mark.parametrize(
    ("weights", "kind"), [("q4_k", "Q5_0"), ("q5_k", "Q5_1"), ("q6_k", "Q8_0")]
)
def test_rows_that_are_no_whole_k_blocks_get_blocks_of_32(tmp_path, weights, kind):
    check_quantised(tmp_path, weights, kind, hidden=128)


def test_quantising_a_bfloat16_directory(tmp_path, llama):
    path = save(llama, tmp_path, torch.bfloat16)
    backend = CppEngineBackend(path, {"max_seq_len": 64, "num_blocks": 8, "weights": "q8_0"})
    plain = CppEngineBackend(path, {"max_seq_len": 64, "num_blocks": 8})
    assert backend.get_memory_info().weight_bytes < 0.6 * plain.get_memory_info().weight_bytes
    with pytest.raises(pocket_cpp_core.Unsupported, match="weights: got 'q2_k'"):
        pocket_cpp_core.Engine(path, num_blocks=1, weights="q2_k")


# --- tokenizer and ends of text ---------------------------------------------------------------


def add_tokenizer(directory, tokens: int = 300) -> None:
    """A byte-level BPE of ``tokens`` ids without merges, whose last two are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"<{i}>" for i in range(tokens - 2 - len(alphabet))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|turn|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "eos_token": {"content": "<|end|>"},
        "chat_template": "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def eos(directory) -> list[int]:
    return pocket_cpp_core.inspect_model(directory)["eos_token_ids"]


def test_all_sources_of_the_end_of_text(directory):
    assert eos(directory) == []
    edit_config(directory, eos_token_id=[2, 5])
    assert eos(directory) == [2, 5]
    generation = directory / "generation_config.json"
    generation.write_text('{"eos_token_id": 7}')
    assert eos(directory) == [7]  # it wins over config.json, as in Transformers
    add_tokenizer(directory)
    assert eos(directory) == [7, 298]  # the tokenizer's own, by its text
    generation.write_text('{"eos_token_id": [299, 298, 300]}')
    assert eos(directory) == [299, 298]  # 300 is beyond the tokenizer: it is never sampled


def test_l7_padded_vocabulary_is_masked(directory):
    add_tokenizer(directory)
    info = pocket_cpp_core.inspect_model(directory)
    assert (info["vocab"], info["tokenizer_tokens"]) == (VOCAB, 300)
    edit_tensors(  # the padding would win every time
        directory,
        lambda tensors: {
            name: torch.cat([values[:300], 50 * values[300:]])
            if name == "lm_head.weight"
            else values
            for name, values in tensors.items()
        },
    )
    with UnifiedEngine.from_args(EngineArgs(model=str(directory), max_model_len=64)) as engine:
        for seed in range(3):
            events = engine.generate(
                prompt_tokens=[token % 300 for token in TOKENS[:8]],
                max_tokens=12,
                temperature=2.0,
                seed=seed,
            )
            tokens = [event["token_id"] for event in events if event["type"] == "token"]
            assert tokens
            assert max(tokens) < 300


def test_a_directory_is_served_with_its_own_tokenizer_and_template(directory):
    add_tokenizer(directory)
    with UnifiedEngine.from_args(EngineArgs(model=str(directory), max_model_len=128)) as engine:
        tokenizer = engine.tokenizer
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
        assert tokenizer.decode(ids, skip_special_tokens=False) == (
            "<|turn|>user: hi\n<|turn|>assistant: "
        )
        events = list(engine.generate(prompt_tokens=ids, max_tokens=6, temperature=0.0))
    answer = [event["token_id"] for event in events if event["type"] == "token"]
    driver = Driver(directory, context=128)
    assert answer == driver.greedy(ids, len(answer), vocab=300)


def test_a_directory_without_a_tokenizer_says_so(directory):
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        UnifiedEngine.from_args(EngineArgs(model=str(directory)))


def test_a_gguf_file_in_a_directory_of_its_own_is_found(tmp_path):
    write_gguf(tmp_path / "model.gguf", TinyLlama())
    CppEngineBackend(tmp_path, {"max_seq_len": 64, "num_blocks": 4}).close()
    shutil.copy(tmp_path / "model.gguf", tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="2 GGUF models"):
        CppEngineBackend(tmp_path, {})
