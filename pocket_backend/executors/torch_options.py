"""Options of the PyTorch backend. Imports no torch, so that they can be checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from pocket_backend.api import ConfigurationError, UnsupportedFeatureError
from pocket_backend.api.errors import short_repr
from pocket_backend.executors.executor_options import ExecutorOptions

DTYPES = {
    "float32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions(ExecutorOptions):
    """Validated; names are those of the older API where it had one.

    ``threads`` counts those of the whole process, since torch has one pool; 0: as torch chooses,
    within a container's CPU quota. Without ``num_blocks`` and ``kv_cache_tokens`` the pool takes
    what the device has room for.

    Raises:
        ConfigurationError: names the option, the value and the remedy.
        UnsupportedFeatureError: a KV type that this backend does not have.
    """

    BACKEND: ClassVar[str] = "the PyTorch backend"

    device: str = "auto"
    """auto (cuda if there is one, else cpu) or a name that torch knows: cpu, cuda:1, mps, npu."""
    dtype: str = "auto"
    """float32, bfloat16 or float16; auto: the checkpoint's own, float32 for GGUF files."""
    kv_cache_dtype: str = "auto"
    """auto: the type of the model's activations."""
    trust_remote_code: bool = False
    """Whether Python code inside the model's directory may run."""
    pack_linear: bool = True
    """On the CPU: let oneDNN put the weights of linear layers into its own order, once."""

    def __post_init__(self) -> None:
        self.check_sizes()
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
    def from_mapping(cls, options: Mapping[str, object]) -> Self:
        """As for every backend; ``torch_dtype`` is the older name of ``dtype``."""
        values = dict(options)
        if "torch_dtype" in values:
            if "dtype" in values:
                raise ConfigurationError("dtype and torch_dtype: give one of them, not both")
            values["dtype"] = str(values.pop("torch_dtype")).removeprefix("torch.")
        return super(TorchOptions, cls).from_mapping(values)
