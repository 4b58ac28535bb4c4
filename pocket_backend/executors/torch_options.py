"""Options of the PyTorch backend. Imports no torch, so that they can be checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from pocket_backend.api import ConfigurationError, UnsupportedFeatureError
from pocket_backend.api.errors import short_repr
from pocket_backend.executors.cpp_options import default_blocks
from pocket_backend.executors.state_options import check_state_options

BLOCK_SIZE = 16
"""Tokens per KV block."""

DTYPES = {
    "float32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
}
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Validated; names are those of the older API where it had one.

    Raises:
        ConfigurationError: names the option, the value and the remedy.
        UnsupportedFeatureError: a KV type that this backend does not have.
    """

    max_batch_size: int = 16
    """Sequences that can be resident: slots."""
    max_seq_len: int | None = None
    """Tokens per sequence; None: the model's context length."""
    max_batch_tokens: int = 512
    """Tokens per step."""
    device: str = "auto"
    """auto (cuda if there is one, else cpu) or a name that torch knows: cpu, cuda:1, mps, npu."""
    dtype: str = "auto"
    """float32, bfloat16 or float16; auto: the checkpoint's own, float32 for GGUF files."""
    kv_cache_dtype: str = "auto"
    """auto: the type of the model's activations."""
    num_blocks: int | None = None
    """KV blocks of 16 tokens. None: from ``kv_cache_tokens``, else what the device has room for."""
    kv_cache_tokens: int | None = None
    threads: int = 0
    """Compute threads of the whole process, since torch has one pool; 0: as torch
    chooses, within a container's CPU quota."""
    trust_remote_code: bool = False
    """Whether Python code inside the model's directory may run."""
    pack_linear: bool = True
    """On the CPU: let oneDNN put the weights of linear layers into its own order, once."""
    max_state_snapshots: int | None = None
    """Models with recurrent state: places for saved states; None: see ``default_snapshots``."""
    state_snapshot_interval_tokens: int | None = None
    """Models with recurrent state: tokens between two saved states of a sequence."""

    def __post_init__(self) -> None:
        _check_int("max_batch_size", self.max_batch_size, 1, 1 << 16)
        _check_int("max_batch_tokens", self.max_batch_tokens, 1, 1 << 20)
        _check_int("threads", self.threads, 0, 1024)
        check_state_options(self.max_state_snapshots, self.state_snapshot_interval_tokens)
        if self.max_seq_len is not None:
            _check_int("max_seq_len", self.max_seq_len, 2, 1 << 24)
        if self.num_blocks is not None:
            _check_int("num_blocks", self.num_blocks, 1, _INT32_MAX // BLOCK_SIZE)
        if self.kv_cache_tokens is not None:
            _check_int("kv_cache_tokens", self.kv_cache_tokens, BLOCK_SIZE, _INT32_MAX)
        if self.num_blocks is not None and self.kv_cache_tokens is not None:
            raise ConfigurationError("num_blocks and kv_cache_tokens: give one of them, not both")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ConfigurationError(
                f"dtype: got {short_repr(self.dtype)}; must be auto, float32, bfloat16 or float16"
            )
        if self.kv_cache_dtype != "auto":
            raise UnsupportedFeatureError(
                f"kv_cache_dtype {self.kv_cache_dtype!r}",
                "the PyTorch backend keeps keys and values in the model's own type (auto)",
                field="kv_cache_dtype",
            )
        if not isinstance(self.device, str) or not self.device:
            raise ConfigurationError(
                f"device: got {short_repr(self.device)}; must be a name such as cpu or cuda"
            )
        for name in ("trust_remote_code", "pack_linear"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(
                    f"{name}: got {short_repr(getattr(self, name))}; must be true or false"
                )

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> TorchOptions:
        """Unknown names are refused; ``torch_dtype`` is the older name of ``dtype``."""
        known = {item.name for item in fields(cls)}
        values = dict(options)
        if "torch_dtype" in values:
            if "dtype" in values:
                raise ConfigurationError("dtype and torch_dtype: give one of them, not both")
            values["dtype"] = str(values.pop("torch_dtype")).removeprefix("torch.")
        for name in values:
            if name not in known:
                raise ConfigurationError(
                    f"options: unknown name {short_repr(name)}; the PyTorch backend has "
                    f"{', '.join(sorted(known))}"
                )
        return cls(**values)  # type: ignore[arg-type]

    def blocks(self, context: int, bytes_per_block: int, available_bytes: int | None) -> int:
        """Blocks of the pool for sequences of up to ``context`` tokens."""
        if self.num_blocks is not None:
            return self.num_blocks
        if self.kv_cache_tokens is not None:
            return self.kv_cache_tokens // BLOCK_SIZE
        return default_blocks(context, bytes_per_block, available_bytes)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(
            f"{name}: got {short_repr(value)}; must be an integer from {low} to {high}"
        )
