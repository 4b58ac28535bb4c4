"""Options of the C++ engine's executor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pocket_backend.api import UnsupportedFeatureError
from pocket_backend.executors.executor_options import ExecutorOptions, check_choice

_KV_DTYPES = {
    "auto": "f16",
    "fp16": "f16",
    "f16": "f16",
    "bf16": "bf16",
    "f32": "f32",
    "int8": "i8",
    "int8_per_token_head": "i8",
}
_KV_DTYPES_PLANNED = frozenset({"fp8", "turboquant_k8v4", "turboquant"})
_PRECISIONS = ("int8", "f32")
_WEIGHTS = ("auto", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k")
_ISAS = ("scalar", "avx2", "avx512")


@dataclass(frozen=True, slots=True, kw_only=True)
class CppEngineOptions(ExecutorOptions):
    """Validated; names are those of the older API where it had one.

    Raises:
        ConfigurationError: names the option, the value and the remedy.
        UnsupportedFeatureError: a KV type that is documented but not built.
    """

    BACKEND: ClassVar[str] = "the C++ engine"

    kv_cache_dtype: str = "auto"
    """auto, fp16 (also f16), bf16, f32 or int8 (one scale per position and head); auto is fp16.
    bf16 is less exact and faster where the CPU multiplies it natively (AVX512_BF16)."""
    precision: str = "int8"
    weights: str = "auto"
    """auto: as the file has them; q8_0, q4_k, ...: float matrices are quantised while loading."""
    isa: str | None = None
    """Instruction set of the kernels; None: the best, or ``POCKETLLM_ISA``."""

    def __post_init__(self) -> None:
        self.check_sizes()
        if self.kv_cache_dtype in _KV_DTYPES_PLANNED:
            raise UnsupportedFeatureError(
                f"kv_cache_dtype {self.kv_cache_dtype!r}",
                f"the C++ engine has {', '.join(sorted(_KV_DTYPES))}",
                field="kv_cache_dtype",
            )
        check_choice("kv_cache_dtype", self.kv_cache_dtype, tuple(_KV_DTYPES))
        check_choice("precision", self.precision, _PRECISIONS)
        check_choice("weights", self.weights, _WEIGHTS)
        if self.isa is not None:
            check_choice("isa", self.isa, _ISAS)

    @property
    def native_kv_dtype(self) -> str:
        return _KV_DTYPES[self.kv_cache_dtype]
