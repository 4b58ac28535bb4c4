"""The older API's names in Python: its documented snippets as they stand, and its arguments."""

from __future__ import annotations

import pytest

pytest.importorskip("pocket_cpp_core", reason="the native module is not built")
pytest.importorskip("gguf", reason="tiny models are written with the gguf package")

from tiny_gguf import TinyLlama, write_gguf

import pocketllm
from pocket_backend.api import ConfigurationError, UnsupportedFeatureError
from pocketllm import (
    ContinuousBatchScheduler,
    CppEngineBackend,
    EngineArgs,
    SamplingParams,
    ScheduledRequest,
    TimingMetrics,
    TokenEvent,
    UnifiedEngine,
)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    path = tmp_path_factory.mktemp("older") / "tiny.gguf"
    write_gguf(path, TinyLlama(context=32768, tokenizer_tokens=333, byte_level=True))
    return str(path)


def test_cpp_backend_with_an_absent_kv_type(ckpt: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match="kv_cache_dtype 'fp8'"):
        CppEngineBackend(ckpt, {"max_batch_size": 8, "max_seq_len": 32768, "kv_cache_dtype": "fp8"})


def test_unified_engine(ckpt: str) -> None:
    backend = CppEngineBackend(
        ckpt, {"max_batch_size": 8, "max_seq_len": 32768, "kv_cache_dtype": "fp16"}
    )
    engine = UnifiedEngine(backend, max_batch_size=8, max_total_tokens=8192)
    kinds = []
    for event in engine.generate(prompt_tokens=[1, 2, 3], max_tokens=100):
        if event["type"] == "token":
            assert isinstance(event["token_id"], int)
        kinds.append(event["type"])
    engine.close()
    assert kinds == ["token"] * 100 + ["finish"]


def test_scheduler_names() -> None:
    scheduler = ContinuousBatchScheduler(max_batch_size=2, max_total_tokens=256)
    scheduler.add_request(ScheduledRequest("a", [1, 2, 3]))
    prefill, decode = scheduler.schedule_step()
    assert [request.request_id for request in prefill] == ["a"]
    assert not decode
    scheduler.complete_request("a")


LLM_SNIPPET = """
from pocketllm import EngineArgs, LLM, SamplingParams
llm = LLM(EngineArgs(model=ckpt, backend="cpp", backend_options={
    "enable_batching": BATCHING, "max_batch_size": 4}))
results = llm.generate(prompt_tokens=[1, 2, 3], sampling_params=SamplingParams(max_tokens=100))
"""


def test_llm_with_batching_on_and_off(ckpt: str) -> None:
    outputs = []
    for batching in (True, False):
        scope: dict[str, object] = {"ckpt": ckpt, "BATCHING": batching}
        exec(LLM_SNIPPET, scope)
        llm, results = scope["llm"], scope["results"]
        assert isinstance(llm, pocketllm.LLM)
        assert llm.engine.max_batch_size == (4 if batching else 1)
        [result] = results  # type: ignore[misc]
        assert result.usage.as_dict()["total_tokens"] == 103
        outputs.append(result.token_ids)
        llm.close()
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 100


ENVIRONMENT = {
    "model": ("CKPT_PATH", "m.gguf", "m.gguf"),
    "backend": ("POCKETLLM_BACKEND", "cpp", "cpp"),
    "tokenizer_path": ("TOKENIZER_PATH", "t", "t"),
    "model_format": ("CKPT_FORMAT", "gguf", "gguf"),
    "device": ("DEVICE", "cpu", "cpu"),
    "dtype": ("DTYPE", "float16", "float16"),
    "max_model_len": ("DEEPSEEK_MAX_MODEL_LEN", "128", 128),
    "max_batch_size": ("DEEPSEEK_SERVING_MAX_RUNNING_REQUESTS", "3", 3),
    "kv_cache_dtype": (
        "POCKETLLM_QWEN_KV_CACHE_DTYPE",
        "int8_per_token_head",
        "int8_per_token_head",
    ),
    "prefill_chunk_tokens": ("POCKETLLM_CPP_PREFILL_CHUNK", "256", 256),
    "enable_prefix_caching": ("ENABLE_PREFIX_CACHING", "0", False),
    "tensor_parallel_size": ("TP_WORLD", "1", 1),
    "tensor_parallel_rank": ("TENSOR_PARALLEL_RANK", "0", 0),
    "attention_window": ("QWEN_ATTENTION_WINDOW", "0", 0),
    "attention_sink_tokens": ("QWEN_ATTENTION_SINK_TOKENS", "0", 0),
    "speculative_tokens": ("SPECULATIVE_TOKENS", "0", 0),
    "threads": ("POCKETLLM_CPU_THREADS", "2", 2),
}


def test_older_environment_names() -> None:
    args = EngineArgs.from_env({name: text for name, text, _ in ENVIRONMENT.values()})
    for field, (_, _, value) in ENVIRONMENT.items():
        assert getattr(args, field) == value
    assert args.max_num_batched_tokens == 256
    assert args.checkpoint_dir == "m.gguf"


@pytest.mark.parametrize(
    ("variable", "text", "field"),
    [
        ("TENSOR_PARALLEL_SIZE", "2", "tensor_parallel_size"),
        ("TP_RANK", "1", "tensor_parallel_rank"),
        ("CONFIG", "x.json", "config_path"),
        ("POCKETLLM_DEVICE_IDS", "0,1", "device_ids"),
        ("SPECULATIVE_METHOD", "mtp", "speculative_method"),
        ("SPECULATIVE_TOKENS", "3", "speculative_tokens"),
        ("QWEN_ATTENTION_WINDOW", "512", "attention_window"),
        ("POCKETLLM_QWEN_KV_CACHE_DTYPE", "turboquant_k8v4", "kv_cache_dtype"),
        ("POCKETLLM_BACKEND", "mimo", "backend"),
    ],
)
def test_variables_of_absent_features_are_refused_by_name(variable, text, field) -> None:
    with pytest.raises(UnsupportedFeatureError, match=variable) as caught:
        EngineArgs.from_env({"POCKETLLM_MODEL": "m", variable: text})
    assert caught.value.field == field
    assert field.split("_")[0] in str(caught.value)


def test_malformed_device_ids() -> None:
    with pytest.raises(ConfigurationError, match="POCKETLLM_DEVICE_IDS"):
        EngineArgs.from_env({"POCKETLLM_MODEL": "m", "POCKETLLM_DEVICE_IDS": "a"})


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"device": "cuda"}, UnsupportedFeatureError, "device 'cuda'"),
        ({"dtype": "float16"}, UnsupportedFeatureError, "dtype 'float16'"),
        ({"model_format": "safetensors"}, ConfigurationError, "model_format: got 'safetensors'"),
    ],
)
def test_arguments_that_the_cpp_engine_cannot_honour(ckpt: str, fields, error, message) -> None:
    with pytest.raises(error, match=message):
        pocketllm.LLM(EngineArgs(model=ckpt, backend="cpp", **fields))


def test_resolved_options_and_checkpoint_dir(ckpt: str) -> None:
    args = EngineArgs(
        model="elsewhere",
        backend_options={"checkpoint_dir": ckpt, "max_batch_size": 2, "isa": "scalar"},
    )
    assert args.resolved().model == ckpt
    assert dict(args.resolved_options) == {"isa": "scalar"}


def test_older_sampling_names() -> None:
    assert SamplingParams(top_logprobs=5).logprobs == 5
    assert SamplingParams(logprobs=True).logprobs == 0
    assert SamplingParams(logprobs=False).logprobs is None
    assert SamplingParams(response_format={"type": "text"}) == SamplingParams()
    with pytest.raises(UnsupportedFeatureError, match="response_format 'json_object'"):
        SamplingParams(response_format={"type": "json_object"})
    with pytest.raises(UnsupportedFeatureError, match="mirostat"):
        SamplingParams(extra={"mirostat": 2})
    params = SamplingParams.from_openai(
        {
            "model": "m",
            "messages": [],
            "max_tokens": 9,
            "max_completion_tokens": 7,
            "temperature": None,
            "stop": "x",
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": -1.5},
        }
    )
    assert params.to_generation_options() == {
        "max_tokens": 7,
        "stop": ("x",),
        "logprobs": 2,
        "logit_bias": {5: -1.5},
    }
    for body, field in [
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": 3}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_p": 7}, "top_p"),
    ]:
        with pytest.raises(pocketllm.InvalidRequestError, match=field):
            SamplingParams.from_openai(body)


def test_older_result_names() -> None:
    timings = TimingMetrics.from_mapping({"ttft_seconds": 1, "other": 2})
    assert timings == TimingMetrics(ttft_seconds=1.0)
    assert TimingMetrics.from_mapping(timings.as_dict()) == timings
    assert TokenEvent("r", (4, 5)).token_id == 5
    assert TokenEvent("r", ()).token_id is None


def test_pytorch_backend_takes_the_documented_options() -> None:
    """The class itself needs torch and a device; its options are checked without either."""
    from pocket_backend.executors.torch_options import TorchOptions

    options = TorchOptions.from_mapping(
        {"max_batch_size": 4, "device": "cuda", "torch_dtype": "float16"}
    )
    assert (options.max_batch_size, options.device, options.dtype) == (4, "cuda", "float16")


def test_capabilities_of_an_engine(ckpt: str) -> None:
    with pocketllm.LLM(EngineArgs(model=ckpt, backend="cpp")) as llm:
        found = llm.capabilities
    assert isinstance(found, pocketllm.BackendCapabilities)
    assert (found.name, found.devices) == ("cpp", ("cpu",))
    assert {"llama", "qwen35"} <= set(found.models)
    assert found.model_formats == ("gguf", "safetensors")
    assert found.supports("prefix_caching")
    assert found.supports("supports_logprobs")
    for absent in ("embeddings", "structured_outputs", "speculative_decoding", "details", "magic"):
        assert not found.supports(absent)


def test_device_kinds() -> None:
    assert pocketllm.device_kinds()[0] == "cpu"
    assert set(pocketllm.device_kinds()) <= {"cpu", "cuda"}


def test_the_older_interface_of_a_backend_is_refused_with_a_remedy() -> None:
    """Importing the names works; whoever uses one is told what there is instead."""
    from pocketllm import BackendContext, BackendFactory, EngineBackend, create_backend

    def subclass(base: type) -> None:
        type("Mine", (base,), {})

    for use in (
        EngineBackend,
        BackendContext,
        BackendFactory,
        lambda: subclass(EngineBackend),
        lambda: subclass(BackendFactory),
    ):
        with pytest.raises(UnsupportedFeatureError, match="register_backend"):
            use()
    with pytest.raises(UnsupportedFeatureError, match=r"LLM\(EngineArgs") as caught:
        create_backend(EngineArgs(model="fake"))
    assert caught.value.feature == "create_backend"
