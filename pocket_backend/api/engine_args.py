"""How an engine is built: model, backend and limits, from code or from the environment."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from pocket_backend.api.errors import (
    ConfigurationError,
    UnsupportedFeatureError,
    short_repr,
)
from pocket_backend.api.older_args import absent_fields, check_backend, refuse_absent

_BACKENDS = ("auto", "cpp", "torch", "fake")
_KV_DTYPES = ("auto", "f32", "fp16", "bf16", "int8", "int8_per_token_head")
_KV_DTYPES_ABSENT = ("fp8", "turboquant_k8v4")
_PRECISIONS = ("int8", "f32")
_MODEL_FORMATS = ("auto", "safetensors", "gguf")
_MAX_BATCH_SIZE = 1024
_UNSUPPORTED_OPTIONS = frozenset(
    {
        "dflash2_checkpoint",
        "dspark_checkpoint",
        "engine_kind",
        "mtp_adaptive",
        "nccl_id_path",
    }
)
"""Documented names of the older API whose feature does not exist here (yet)."""


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """Frozen and validated; every field can be set by the environment variable in ``from_env``.

    Raises:
        ConfigurationError: names the field, the value and the remedy.
    """

    model: str
    """A GGUF file, or a Hugging Face directory with config.json and safetensors."""
    backend: str = "auto"
    tokenizer_path: str | None = None
    """A GGUF file or a directory with tokenizer.json; None: the model's own."""
    max_model_len: int | None = None
    """Tokens per sequence; None: the model's context length."""
    max_batch_size: int = 16
    """Sequences that run at once."""
    max_num_batched_tokens: int = 512
    """Token budget of one step."""
    kv_cache_tokens: int | None = None
    """Capacity of the KV pool in tokens; None: sized from the limits above and free memory."""
    kv_cache_dtype: str = "auto"
    precision: str = "int8"
    """int8: activations quantised for integer kernels; f32: the exact float path."""
    threads: int = 0
    """Compute threads; 0: the CPUs in this process's affinity mask, within a container's quota."""
    max_queue: int = 1024
    """Requests that may wait; more are refused with OverloadedError."""
    enable_prefix_caching: bool = True
    enable_batching: bool = True
    """False: one request at a time."""
    request_timeout_seconds: float | None = None
    """Deadline of requests that bring none of their own; None: none."""
    backend_options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    model_format: str = "auto"
    """auto, safetensors or gguf; a model of another format is refused."""
    prefill_chunk_tokens: int | None = None
    """The older API's name of ``max_num_batched_tokens``, which it sets."""
    device: str = "auto"
    """auto, cpu, or a name that torch knows (PyTorch backend only)."""
    dtype: str = "auto"
    """auto, or the PyTorch backend's type of weights and activations."""
    # Of the older API, without a feature behind them: see older_args.py.
    config_path: str | None = None
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    device_ids: tuple[int, ...] | None = None
    attention_window: int | None = None
    attention_sink_tokens: int | None = None
    speculative_method: str | None = None
    speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigurationError(
                f"model: got {short_repr(self.model)}; give a GGUF file or a Hugging Face directory"
            )
        check_backend(self.backend, _BACKENDS)
        for name in absent_fields():
            refuse_absent(name, getattr(self, name))
        if self.kv_cache_dtype in _KV_DTYPES_ABSENT:
            raise UnsupportedFeatureError(
                f"kv_cache_dtype {self.kv_cache_dtype!r}",
                f"there are {', '.join(_KV_DTYPES)}",
                field="kv_cache_dtype",
            )
        _check_choice("model_format", self.model_format, _MODEL_FORMATS)
        for name in ("device", "dtype"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigurationError(
                    f"{name}: got {short_repr(getattr(self, name))}; must be a name such as 'auto'"
                )
        if self.prefill_chunk_tokens is not None:
            _check_int("prefill_chunk_tokens", self.prefill_chunk_tokens, 1, 1 << 20)
            object.__setattr__(self, "max_num_batched_tokens", self.prefill_chunk_tokens)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, _KV_DTYPES)
        _check_choice("precision", self.precision, _PRECISIONS)
        _check_int("max_batch_size", self.max_batch_size, 1, _MAX_BATCH_SIZE)
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        _check_int("threads", self.threads, 0, 4096)
        _check_int("max_queue", self.max_queue, 0, 1 << 20)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2, 1 << 24)
        if self.kv_cache_tokens is not None:
            _check_int("kv_cache_tokens", self.kv_cache_tokens, 16, 1 << 30)
        timeout = self.request_timeout_seconds
        if timeout is not None and not (
            type(timeout) in (int, float) and math.isfinite(timeout) and timeout > 0
        ):
            raise ConfigurationError(
                f"request_timeout_seconds: got {short_repr(timeout)}; must be a finite number "
                "above 0, or None"
            )
        for name in ("enable_batching", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(
                    f"{name}: got {short_repr(getattr(self, name))}; must be true or false"
                )
        if self.max_num_batched_tokens < self.max_batch_size:
            raise ConfigurationError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}; must be at least "
                f"max_batch_size ({self.max_batch_size}), or running requests would starve"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> EngineArgs:
        """Build from ``POCKETLLM_*`` (and the older names); empty values count as unset.

        Raises:
            ConfigurationError: a value is malformed or out of range; the message names the variable
                or the field.
            UnsupportedFeatureError: a variable asks for a feature that this version does not have.
        """
        env = os.environ if environ is None else environ
        values: dict[str, object] = {}
        given: dict[str, str] = {}
        for name, (kind, variables) in _ENV.items():
            for variable in variables:
                if env.get(variable):
                    values[name] = _parse(variable, env[variable], kind)
                    given[name] = variable
                    break
        if "model" not in values:
            raise ConfigurationError(
                "model: not set; set POCKETLLM_MODEL to the path of a GGUF file"
            )
        try:
            return cls(**values)  # type: ignore[arg-type]
        except UnsupportedFeatureError as error:
            variable = given.get(error.field or "", "")
            raise UnsupportedFeatureError(
                f"{error.feature} (environment variable {variable})", field=error.field
            ) from error

    @property
    def checkpoint_dir(self) -> str:
        """The older API's name of ``model``."""
        return self.model

    @property
    def resolved_options(self) -> Mapping[str, object]:
        """``backend_options`` that are the backend's own (``resolved``)."""
        return self.resolved().backend_options

    def resolved(self) -> EngineArgs:
        """These arguments with the engine's own names moved out of ``backend_options``.

        The older API passes ``enable_batching``, ``max_batch_size`` and ``timeout_ms`` there. What
        is left are options of the backend, which checks their names itself.

        Raises:
            ConfigurationError: a value is of the wrong kind or out of range.
            UnsupportedFeatureError: a documented option whose feature this version does not have.
        """
        options = dict(self.backend_options)
        for name in _UNSUPPORTED_OPTIONS & options.keys():
            raise UnsupportedFeatureError(
                f"backend_options[{name!r}]", "not part of this version", field=name
            )
        changes: dict[str, object] = {}
        if "checkpoint_dir" in options:
            changes["model"] = options.pop("checkpoint_dir")
        if "enable_batching" in options:
            changes["enable_batching"] = options.pop("enable_batching")
        if "max_batch_size" in options:
            changes["max_batch_size"] = options.pop("max_batch_size")
        if "timeout_ms" in options:
            milliseconds = options.pop("timeout_ms")
            _check_int("timeout_ms", milliseconds, 1, 2**31 - 1)
            assert isinstance(milliseconds, int)
            changes["request_timeout_seconds"] = milliseconds / 1000.0
        return replace(self, backend_options=MappingProxyType(options), **changes)  # type: ignore[arg-type]

    def model_path(self) -> Path:
        return Path(self.model).expanduser()


_ENV: Mapping[str, tuple[type, tuple[str, ...]]] = MappingProxyType(
    {
        "model": (str, ("POCKETLLM_MODEL", "CKPT_PATH")),
        "backend": (str, ("POCKETLLM_BACKEND",)),
        "tokenizer_path": (str, ("POCKETLLM_TOKENIZER_PATH", "TOKENIZER_PATH")),
        "config_path": (str, ("POCKETLLM_CONFIG_PATH", "CONFIG_PATH", "CONFIG")),
        "model_format": (str, ("POCKETLLM_MODEL_FORMAT", "CKPT_FORMAT")),
        "tensor_parallel_size": (
            int,
            ("POCKETLLM_TENSOR_PARALLEL_SIZE", "TENSOR_PARALLEL_SIZE", "TP_WORLD"),
        ),
        "tensor_parallel_rank": (
            int,
            ("POCKETLLM_TENSOR_PARALLEL_RANK", "TENSOR_PARALLEL_RANK", "TP_RANK"),
        ),
        "device": (str, ("POCKETLLM_DEVICE", "DEVICE")),
        "device_ids": (tuple, ("POCKETLLM_DEVICE_IDS",)),
        "dtype": (str, ("POCKETLLM_DTYPE", "DTYPE")),
        "prefill_chunk_tokens": (
            int,
            (
                "POCKETLLM_PREFILL_CHUNK_TOKENS",
                "PREFILL_CHUNK_TOKENS",
                "POCKETLLM_CPP_PREFILL_CHUNK",
            ),
        ),
        "attention_window": (int, ("POCKETLLM_ATTENTION_WINDOW", "QWEN_ATTENTION_WINDOW")),
        "attention_sink_tokens": (
            int,
            ("POCKETLLM_ATTENTION_SINK_TOKENS", "QWEN_ATTENTION_SINK_TOKENS"),
        ),
        "speculative_method": (str, ("POCKETLLM_SPECULATIVE_METHOD", "SPECULATIVE_METHOD")),
        "speculative_tokens": (int, ("POCKETLLM_SPECULATIVE_TOKENS", "SPECULATIVE_TOKENS")),
        "max_model_len": (
            int,
            ("POCKETLLM_MAX_MODEL_LEN", "MAX_MODEL_LEN", "DEEPSEEK_MAX_MODEL_LEN"),
        ),
        "max_batch_size": (
            int,
            (
                "POCKETLLM_MAX_BATCH_SIZE",
                "MAX_BATCH_SIZE",
                "DEEPSEEK_SERVING_MAX_RUNNING_REQUESTS",
            ),
        ),
        "max_num_batched_tokens": (int, ("POCKETLLM_MAX_NUM_BATCHED_TOKENS",)),
        "kv_cache_tokens": (int, ("POCKETLLM_KV_CACHE_TOKENS",)),
        "kv_cache_dtype": (
            str,
            ("POCKETLLM_KV_CACHE_DTYPE", "POCKETLLM_QWEN_KV_CACHE_DTYPE", "KV_CACHE_DTYPE"),
        ),
        "precision": (str, ("POCKETLLM_PRECISION",)),
        "threads": (int, ("POCKETLLM_THREADS", "POCKETLLM_CPU_THREADS")),
        "max_queue": (int, ("POCKETLLM_MAX_QUEUE",)),
        "enable_prefix_caching": (
            bool,
            ("POCKETLLM_ENABLE_PREFIX_CACHING", "ENABLE_PREFIX_CACHING"),
        ),
        "enable_batching": (bool, ("POCKETLLM_ENABLE_BATCHING",)),
        "request_timeout_seconds": (float, ("POCKETLLM_REQUEST_TIMEOUT_SECONDS",)),
    }
)
_TRUE = {"1": True, "true": True, "yes": True, "on": True}
_FALSE = {"0": False, "false": False, "no": False, "off": False}


def _parse(variable: str, text: str, kind: type) -> object:
    if kind is bool:
        value = (_TRUE | _FALSE).get(text.strip().lower())
        if value is None:
            raise ConfigurationError(f"{variable}: got {short_repr(text)}; must be true or false")
        return value
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "an integer" if kind is int else "a number"
            raise ConfigurationError(
                f"{variable}: got {short_repr(text)}; must be {wanted}"
            ) from None
    if kind is tuple:
        try:
            return tuple(int(part) for part in text.split(","))
        except ValueError:
            raise ConfigurationError(
                f"{variable}: got {short_repr(text)}; must be integers with commas between them"
            ) from None
    return text


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(
            f"{name}: got {short_repr(value)}; must be one of {', '.join(allowed)}"
        )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(
            f"{name}: got {short_repr(value)}; must be an integer from {low} to {high}"
        )
