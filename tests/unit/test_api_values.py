"""EngineArgs, SamplingParams, results and errors: validated, frozen, named in messages."""

from __future__ import annotations

import dataclasses

import pytest

from pocket_backend.api import (
    BackendNotImplementedError,
    ConfigurationError,
    DeadlineExceededError,
    EngineArgs,
    GenerationRequest,
    InvalidRequestError,
    OverloadedError,
    PocketLLMError,
    RequestCancelledError,
    SamplingParams,
    UnsupportedFeatureError,
    Usage,
)
from pocket_backend.api import errors as errors_module
from pocket_backend.api.errors import short_repr

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "3"),
        ("min_tokens", -1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", NAN),
        ("top_k", -2),
        ("min_p", 1.5),
        ("seed", 2**64),
        ("seed", 1.0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", INF),
        ("presence_penalty", 101.0),
        ("stop", [""]),
        ("stop", ["x" * 2000]),
        ("stop", ["x"] * 100),
        ("stop", [1]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [1] * 200),
        ("stop_token_ids", "12"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: NAN}),
        ("logit_bias", [1]),
        ("logit_bias", dict.fromkeys(range(2000), 0.0)),
        ("n", 0),
        ("n", 5_000_000),
        ("logprobs", 21),
        ("logprobs", -1),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
    ],
)
def test_bad_sampling_params_name_the_field(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name
    assert caught.value.http_status == 400
    assert len(str(caught.value)) < 400


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_tokens.*max_tokens \(3\)"):
        SamplingParams(max_tokens=3, min_tokens=4)
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3


def test_convenient_spellings() -> None:
    params = SamplingParams(stop="end", top_k=-1, stop_token_ids=[1, 2])
    assert (params.stop, params.top_k, params.stop_token_ids) == (("end",), 0, (1, 2))


def test_params_are_frozen_hashable_and_own_their_bias() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 3.0
    assert dict(params.logit_bias) == {1: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[3] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0.0, True), (1e-5, True), (1e-4, False), (1.0, False)]
)
def test_greedy_below_the_epsilon(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_token_budget() -> None:
    assert SamplingParams().token_budget(10, 64) == 54
    assert SamplingParams(max_tokens=5).token_budget(10, 64) == 5
    assert SamplingParams(max_tokens=500).token_budget(10, 64) == 54
    assert SamplingParams(max_tokens=5).token_budget(63, 64) == 1


def test_required_features() -> None:
    assert SamplingParams().required_features() == frozenset()
    params = SamplingParams(
        min_p=0.1,
        min_tokens=1,
        presence_penalty=0.5,
        logit_bias={1: 1.0},
        logprobs=0,
        n=2,
        bad_words="x",
        prompt_logprobs=1,
    )
    assert params.required_features() == {
        "min_p", "min_tokens", "penalties", "logit_bias", "logprobs", "n", "bad_words",
        "prompt_logprobs",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", None),
        ("backend", "nope"),
        ("kv_cache_dtype", "q4"),
        ("precision", "int4"),
        ("max_batch_size", 0),
        ("max_batch_size", 10**6),
        ("max_num_batched_tokens", 0),
        ("threads", -1),
        ("max_queue", -1),
        ("max_model_len", 1),
        ("kv_cache_tokens", 3),
        ("enable_batching", "yes"),
        ("enable_prefix_caching", 1),
        ("request_timeout_seconds", 0.0),
        ("request_timeout_seconds", NAN),
    ],
)
def test_bad_engine_args_name_the_field(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        EngineArgs(**{"model": "m.gguf", name: value})  # type: ignore[arg-type]


def test_token_budget_must_cover_the_batch() -> None:
    with pytest.raises(ConfigurationError, match="max_num_batched_tokens"):
        EngineArgs(model="m", max_batch_size=16, max_num_batched_tokens=8)


def test_engine_args_from_the_environment() -> None:
    args = EngineArgs.from_env(
        {
            "POCKETLLM_MODEL": "a.gguf",
            "CKPT_PATH": "older.gguf",
            "MAX_MODEL_LEN": "512",
            "POCKETLLM_MAX_BATCH_SIZE": "4",
            "ENABLE_PREFIX_CACHING": "off",
            "POCKETLLM_REQUEST_TIMEOUT_SECONDS": "2.5",
            "POCKETLLM_PRECISION": "",
        }
    )
    assert (args.model, args.max_model_len, args.max_batch_size) == ("a.gguf", 512, 4)
    assert args.enable_prefix_caching is False
    assert args.request_timeout_seconds == 2.5
    assert args.precision == "int8"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "POCKETLLM_MODEL"),
        ({"POCKETLLM_MODEL": "m", "MAX_BATCH_SIZE": "many"}, "MAX_BATCH_SIZE"),
        ({"POCKETLLM_MODEL": "m", "ENABLE_PREFIX_CACHING": "maybe"}, "true or false"),
        ({"POCKETLLM_MODEL": "m", "POCKETLLM_REQUEST_TIMEOUT_SECONDS": "x"}, "a number"),
        ({"POCKETLLM_MODEL": "m", "POCKETLLM_BACKEND": "cuda"}, "backend"),
    ],
)
def test_bad_environment(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EngineArgs.from_env(environment)


def test_older_backend_options_are_moved_to_their_fields() -> None:
    args = EngineArgs(
        model="m",
        backend_options={
            "enable_batching": False,
            "max_batch_size": 4,
            "timeout_ms": 60000,
            "own": 1,
        },
    ).resolved()
    assert (args.enable_batching, args.max_batch_size) == (False, 4)
    assert args.request_timeout_seconds == 60.0
    assert dict(args.backend_options) == {"own": 1}
    assert args.resolved() == args


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"timeout_ms": 0}, ConfigurationError),
        ({"timeout_ms": "soon"}, ConfigurationError),
        ({"max_batch_size": 0}, ConfigurationError),
        ({"mtp_adaptive": True}, UnsupportedFeatureError),
        ({"nccl_id_path": "x"}, UnsupportedFeatureError),
    ],
)
def test_bad_backend_options(options: dict[str, object], error: type[Exception]) -> None:
    args = EngineArgs(model="m", backend_options=options)
    with pytest.raises(error, match=next(iter(options))):
        args.resolved()


def test_every_error_has_its_codes() -> None:
    found = [
        value
        for value in vars(errors_module).values()
        if isinstance(value, type) and issubclass(value, PocketLLMError)
    ]
    assert len(found) >= 12
    for error in found:
        assert 400 <= error.http_status < 600
        assert error.grpc_code.isupper()
    assert (OverloadedError.http_status, OverloadedError.grpc_code) == (503, "UNAVAILABLE")
    assert RequestCancelledError.grpc_code == "CANCELLED"
    assert DeadlineExceededError.grpc_code == "DEADLINE_EXCEEDED"
    assert BackendNotImplementedError.http_status == 501
    assert UnsupportedFeatureError("x", "y", field="f").field == "f"


def test_messages_never_echo_large_values() -> None:
    for value in ("x" * 10**6, ["x"] * 10**6, {i: i for i in range(10**5)}, b"y" * 10**6):
        assert len(short_repr(value)) < 200


def test_requests_and_usage_are_plain_values() -> None:
    request = GenerationRequest("r", (1, 2))
    assert request.sampling_params == SamplingParams()
    assert Usage(3, 4, 1).as_dict() == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 1,
        "total_tokens": 7,
    }
