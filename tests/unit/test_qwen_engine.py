"""``pocket_cpp_core.QwenEngine`` and its options: the older API's native engine."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

native = pytest.importorskip("pocket_cpp_core", reason="the native module is not built")
pytest.importorskip("gguf", reason="tiny models are written with the gguf package")

from tiny_gguf import TinyLlama, write_gguf  # noqa: E402

import pocketllm  # noqa: E402

SNIPPET = """
from pocket_cpp_core import QwenEngine, QwenEngineOptions
options = QwenEngineOptions()
options.max_batch_size = 8
engine = QwenEngine(ckpt, options, layer_count=64, max_context=32768)
result = engine.prefill([1, 2, 3], slot_id=0)
first = result
result = engine.decode_step(result.top_token, slot_id=0)
engine.kv_cache_bytes()
engine.activation_workspace_peak_bytes()
"""


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """As deep and long as the documented call asks for, and otherwise tiny."""
    path = tmp_path_factory.mktemp("deep") / "deep.gguf"
    shape = {"hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32, "vocab": 64}
    write_gguf(path, TinyLlama(layers=64, context=32768, **shape))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, TinyLlama(weight_format="Q8_0", tokenizer_tokens=300))
    return path


def options_of(**changes: object):
    return native.QwenEngineOptions(**{"max_batch_size": 2, "threads": 1, **changes})


@pytest.fixture
def engine(model):
    return native.QwenEngine(model, options_of(), max_context=64)


def test_the_documented_snippet_runs_unchanged(deep: Path) -> None:
    scope: dict[str, object] = {"ckpt": str(deep)}
    exec(SNIPPET, scope)
    engine, first, result = scope["engine"], scope["first"], scope["result"]
    assert (first.position, result.position) == (3, 4)
    assert (result.token, result.layers, result.dim) == (first.top_token, 64, 32)
    assert engine.max_context == 32768
    assert engine.kv_cache_bytes() == engine.kv_cache_bytes > 0
    assert engine.activation_workspace_peak_bytes() > 0
    assert engine.position == 4
    for slot_id in range(8):
        engine.reset(slot_id)
    assert engine.position == 0


@pytest.mark.parametrize("alias", ["pocketllm_cpp", "dsv4_cpp_core"])
def test_aliases_are_the_same_module(alias: str) -> None:
    module = importlib.import_module(alias)
    for name in ("QwenEngine", "QwenBatchScheduler", "InferenceEngine", "UnsupportedFeatureError"):
        assert getattr(module, name) is getattr(native, name)


def test_results_are_complete_and_repeatable(engine) -> None:
    result = engine.prefill(np.array([5, 6, 7]), slot_id=1)
    logits = result.logits
    assert (logits.dtype, logits.shape) == (np.float32, (333,))
    # Ids from 300 on are padding: no token of the file's tokenizer.
    assert result.top_token == int(np.argmax(logits[:300]))
    assert result.top_logit == logits[result.top_token]
    assert result.checksum == pytest.approx(float(logits.astype(np.float64).sum()))
    values = result.as_dict()
    assert (values["proposed_drafts"], values["rolled_back"], values["accept_tokens"]) == (
        0,
        False,
        [],
    )
    other = engine.prefill([5, 6], slot_id=0)
    assert other.position == 2
    assert np.array_equal(engine.decode_step(7, slot_id=0).logits, logits)


def test_generate_uses_a_free_slot_and_gives_it_back(engine) -> None:
    prompt = [11, 12, 13]
    output = engine.generate(prompt, 5)
    assert len(output) == 5
    result = engine.prefill(prompt)
    for token in output:
        assert result.top_token == token
        result = engine.decode_step(token)
    engine.prefill([1], slot_id=1)
    with pytest.raises(native.ResourceExhausted, match="no slot is free"):
        engine.generate(prompt, 1)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda e: e.prefill([1], slot_id=2), "slot_id: got 2; must be from 0 to 1"),
        (lambda e: e.reset(-1), "slot_id: got -1"),
        (lambda e: e.decode_step(1, slot_id=1), "slot 1: holds no tokens; prefill it"),
        (lambda e: [e.prefill([1]), e.prefill([1])], "slot 0: already holds 1 tokens; reset it"),
        (lambda e: e.prefill([1] * 65), "token_ids: got 65; the context holds 64"),
        (lambda e: [e.prefill([1] * 64), e.decode_step(1)], "context of 64 tokens is full"),
        (lambda e: e.prefill([]), "token_ids: got none"),
        (lambda e: e.prefill([1, 300]), r"token_ids\[1\]: got 300; must be from 0 to 299"),
        (lambda e: e.decode_step(-1), "holds no tokens"),
    ],
)
def test_misused_slots(engine, use, message: str) -> None:
    with pytest.raises(native.InvalidArgument, match=message) as caught:
        use(engine)
    assert isinstance(caught.value, ValueError)
    engine.reset(0)
    assert engine.prefill([1, 2], slot_id=0).position == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp_world", 2),
        ("tp_rank", 1),
        ("device", 3),
        ("attention_window", 128),
        ("attention_sink_tokens", 4),
        ("state_snapshot_interval_tokens", 1),
        ("max_state_snapshots", 1),
        ("mtp", True),
        ("mtp_speculative_tokens", 2),
        ("mtp_adaptive", True),
        ("dspark_checkpoint", "x"),
        ("dflash2_checkpoint", "x"),
        ("nccl_id_path", "x"),
        ("kv_paged", False),
        ("kv_block_size", 32),
        ("prefix_cache_bytes", 1),
        ("kv_cache_dtype", native.QwenKvCacheDType.Fp8),
        ("kv_cache_dtype", "turboquant_k8v4"),
    ],
)
def test_options_without_a_feature_are_refused_by_name(model, name: str, value: object) -> None:
    options = options_of()
    setattr(options, name, value)
    with pytest.raises(native.UnsupportedFeatureError, match=name) as caught:
        native.QwenEngine(model, options)
    # As scripts catch it, from the package.
    assert isinstance(caught.value, pocketllm.UnsupportedFeatureError)
    assert caught.value.feature.startswith(name)


def test_kernel_choices_are_refused_unless_they_are_automatic(model) -> None:
    options = options_of()
    options.kernel.nvfp4_mode = native.NvFp4Mode.Auto
    options.kernel.gqa_optimized = native.OptionalSwitch.Auto
    assert native.QwenEngine(model, options).max_context == 512
    options.kernel.gqa_optimized = native.OptionalSwitch.Enabled
    with pytest.raises(native.UnsupportedFeatureError, match=r"kernel\.gqa_optimized"):
        native.QwenEngine(model, options)
    with pytest.raises(AttributeError, match="no_such"):
        options.kernel.no_such = 1
    with pytest.raises(native.UnsupportedFeatureError, match="load_from_env"):
        options.kernel.load_from_env()


def test_layers_are_all_or_refused(model) -> None:
    with pytest.raises(native.UnsupportedFeatureError, match="layer_count 1"):
        native.QwenEngine(model, options_of(), layer_count=1)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("max_batch_size", -1, ValueError, "max_batch_size: got -1"),
        ("max_batch_size", 2**70, ValueError, "max_batch_size: got"),
        ("max_batch_size", "8", TypeError, "max_batch_size: must be an integer"),
        ("max_batch_size", 2.5, TypeError, "max_batch_size: must be an integer"),
        ("kv_cache_dtype", "fp4", ValueError, "kv_cache_dtype: got 'fp4'; must be one of fp16"),
        ("precision", "f64", ValueError, "precision: got 'f64'"),
        ("no_such_option", 1, AttributeError, "no_such_option"),
    ],
)
def test_bad_option_values_are_refused_when_set(name, value, error, message: str) -> None:
    with pytest.raises(error, match=message):
        setattr(native.QwenEngineOptions(), name, value)
    with pytest.raises(error, match=message):
        native.QwenEngineOptions(**{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size: got 0; must be from 1 to 1024"),
        ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens: got 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"kv_cache_bytes": 10}, "kv_cache_bytes: got 10; one KV block"),
    ],
)
def test_bad_option_values_are_refused_by_the_engine(model, change, message: str) -> None:
    with pytest.raises(native.InvalidArgument, match=message):
        native.QwenEngine(model, options_of(**change))


def test_prefix_statistics_and_blocks(engine) -> None:
    prompt = list(range(40))
    engine.prefill(prompt, slot_id=0)
    engine.prefill(prompt, slot_id=1)
    stats = engine.prefix_cache_stats
    assert (stats.prompt_tokens, stats.reused_tokens, stats.computed_tokens) == (40, 32, 8)
    assert (stats.hits, stats.misses, stats.global_hits) == (1, 1, 2)
    assert stats.resume_source == "blocks"
    assert stats.snapshots == 0
    total = engine.kv_total_blocks
    assert engine.kv_free_blocks == total - 4
    engine.reset(0)
    engine.reset(1)
    assert engine.kv_cache_pinned_blocks == 2
    assert engine.prefix_cache_stats.global_cache_bytes == 2 * engine.config["kv_bytes_per_block"]
    assert engine.kv_evict_cache_blocks(1) == 1
    engine.clear_prefix_cache()
    assert engine.kv_free_blocks == total
    assert engine.kv_blocks_for_tokens(17) == 2


def test_what_belongs_to_other_machines_is_refused_or_empty(engine) -> None:
    engine.warmup_tp()
    with pytest.raises(native.UnsupportedFeatureError, match="run_worker_loop"):
        engine.run_worker_loop()
    with pytest.raises(native.UnsupportedFeatureError, match="worker_command_prefill"):
        engine.worker_command_prefill([1])
    assert isinstance(engine.mtp_stats, native.QwenMtpStats)
    assert engine.mtp_stats.verify_count == engine.mtp_stats.accept_rate == 0
    assert engine.device == "cpu"
    assert engine.runtime_telemetry["threads"] == 1
    caps = engine.caps
    assert caps().max_slots == caps.max_slots == 2
    assert caps.paged_kv
    assert caps.chunked_prefill
    assert not caps.logprobs


def test_names_without_a_feature_can_be_imported() -> None:
    """Records are records; the engine that is not here says what to use."""
    found = native.TokenLogprob()
    found.present, found.logprob, found.top_tokens, found.top_logprobs = True, -0.5, [3], [-0.5]
    assert (found.present, found.logprob, found.top_tokens) == (True, -0.5, [3])
    assert native.BatchDecodeResult().logprobs == []
    options = native.ForwardSmokeOptions()
    assert (options.tp_world, options.tp_rank, options.device) == (1, 0, 0)
    options.skip_fp4_host_prepare, options.nccl_id_path = True, "id"
    with pytest.raises(native.UnsupportedFeatureError, match="use QwenEngine") as caught:
        native.PersistentEngine("model", options, layer_count=2, max_context=64)
    assert caught.value.feature == "PersistentEngine"


def test_architectures(model, tmp_path: Path) -> None:
    assert native.detect_architecture(model) == "llama"
    assert "llama" in native.registered_architectures()
    assert not native.is_qwen3_5_checkpoint(model)
    with pytest.raises(native.ModelFileError):
        native.detect_architecture(tmp_path / "none.gguf")
    assert native.backend == "cpu"
    for dtype in native.QwenKvCacheDType.__members__.values():
        name = native.qwen_kv_cache_dtype_name(dtype)
        assert native.parse_qwen_kv_cache_dtype(name) == dtype
