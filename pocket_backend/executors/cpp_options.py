"""Options of the C++ engine's executor, and how large its KV pool is when nobody says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from pocket_backend.api import ConfigurationError, UnsupportedFeatureError
from pocket_backend.api.errors import short_repr
from pocket_backend.executors.state_options import check_state_options

BLOCK_SIZE = 16
"""Tokens per KV block of the C++ engine."""

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
_WEIGHTS = ("auto", "q8_0", "q4_0")
_ISAS = ("scalar", "avx2", "avx512")
_INT32_MAX = 2**31 - 1

_DEFAULT_CONTEXTS = 4
_DEFAULT_POOL_TOKENS = 32768
_MEMORY_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class CppEngineOptions:
    """Validated; names are those of the older API where it had one.

    Raises:
        ConfigurationError: names the option, the value and the remedy.
        UnsupportedFeatureError: a KV type that is documented but not built.
    """

    max_batch_size: int = 16
    """Sequences that can be resident: slots."""
    max_seq_len: int | None = None
    """Tokens per sequence; None: the model's context length."""
    max_batch_tokens: int = 512
    """Tokens per step."""
    kv_cache_dtype: str = "auto"
    """auto, fp16 (also f16), bf16, f32 or int8 (one scale per position and head); auto is fp16.
    bf16 is less exact and faster where the CPU multiplies it natively (AVX512_BF16)."""
    num_blocks: int | None = None
    """KV blocks of 16 tokens. None: from ``kv_cache_tokens``, else sized by ``default_blocks``."""
    kv_cache_tokens: int | None = None
    threads: int = 0
    precision: str = "int8"
    weights: str = "auto"
    """auto: as the file has them; q8_0 or q4_0: float matrices are quantised while loading."""
    isa: str | None = None
    """Instruction set of the kernels; None: the best, or ``POCKETLLM_ISA``."""
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
        if self.kv_cache_dtype in _KV_DTYPES_PLANNED:
            raise UnsupportedFeatureError(
                f"kv_cache_dtype {self.kv_cache_dtype!r}",
                f"the C++ engine has {', '.join(sorted(_KV_DTYPES))}",
                field="kv_cache_dtype",
            )
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, tuple(_KV_DTYPES))
        _check_choice("precision", self.precision, _PRECISIONS)
        _check_choice("weights", self.weights, _WEIGHTS)
        if self.isa is not None:
            _check_choice("isa", self.isa, _ISAS)

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> CppEngineOptions:
        """Unknown names are refused: a misspelt limit would otherwise be silently ignored."""
        known = {item.name for item in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigurationError(
                    f"options: unknown name {short_repr(name)}; the C++ engine has "
                    f"{', '.join(sorted(known))}"
                )
        return cls(**options)  # type: ignore[arg-type]

    @property
    def native_kv_dtype(self) -> str:
        return _KV_DTYPES[self.kv_cache_dtype]

    def blocks(self, context: int, bytes_per_block: int, available_bytes: int | None) -> int:
        """Blocks of the pool for sequences of up to ``context`` tokens."""
        if self.num_blocks is not None:
            return self.num_blocks
        if self.kv_cache_tokens is not None:
            return self.kv_cache_tokens // BLOCK_SIZE
        return default_blocks(context, bytes_per_block, available_bytes)


def default_blocks(context: int, bytes_per_block: int, available_bytes: int | None) -> int:
    """Size of a pool that nobody specified.

    One sequence must fit at full length. Beyond that, concurrency decides: four full contexts, or
    32k tokens if that is less (sixteen chats of 2k). Short-context models so get a small pool and
    long-context ones no more than one sequence needs. 40 % of what is available leaves room for
    weights, the page cache of the model file and the other processes of a Triton server; a pool
    cut by it makes the longest requests impossible, which admission reports by name.
    """
    tokens = max(context, min(_DEFAULT_CONTEXTS * context, _DEFAULT_POOL_TOKENS))
    blocks = -(-tokens // BLOCK_SIZE)
    if available_bytes is not None:
        blocks = min(blocks, int(available_bytes * _MEMORY_SHARE) // bytes_per_block)
    return max(1, blocks)


def available_memory() -> int | None:
    """Bytes that this process may still take: the machine's and its control groups' limits.

    None when the system does not say (no ``/proc``).
    """
    found = [value for value in (_machine_available(), *_cgroup_available()) if value is not None]
    return min(found) if found else None


def _machine_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> Iterator[int | None]:
    # Version 2, then version 1; inside a container the process's own group is at the root.
    yield _difference("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
    v1 = "/sys/fs/cgroup/memory/memory."
    yield _difference(f"{v1}limit_in_bytes", f"{v1}usage_in_bytes")


def _difference(limit_file: str, usage_file: str) -> int | None:
    try:
        limit = Path(limit_file).read_text(encoding="ascii").strip()
        usage = Path(usage_file).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return max(0, int(limit) - int(usage)) if limit.isdigit() and usage.isdigit() else None


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(
            f"{name}: got {short_repr(value)}; must be an integer from {low} to {high}"
        )


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(
            f"{name}: got {short_repr(value)}; must be one of {', '.join(allowed)}"
        )
