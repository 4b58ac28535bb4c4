"""Options that every backend has: slots, sizes of steps and of the KV pool, snapshots of states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from pocket_backend.api import ConfigurationError
from pocket_backend.api.errors import short_repr
from pocket_backend.executors.state_options import check_state_options

BLOCK_SIZE = 16
"""Tokens per KV block."""

_INT32_MAX = 2**31 - 1
_DEFAULT_CONTEXTS = 4
_DEFAULT_POOL_TOKENS = 32768
_MEMORY_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """What a backend's options begin with. A subclass checks them in its ``__post_init__``.

    Raises:
        ConfigurationError: names the option, the value and the remedy.
    """

    BACKEND: ClassVar[str]
    """As messages call it."""

    max_batch_size: int = 16
    """Sequences that can be resident: slots."""
    max_seq_len: int | None = None
    """Tokens per sequence; None: the model's context length."""
    max_batch_tokens: int = 512
    """Tokens per step."""
    num_blocks: int | None = None
    """KV blocks of 16 tokens. None: from ``kv_cache_tokens``, else sized by ``default_blocks``."""
    kv_cache_tokens: int | None = None
    threads: int = 0
    """Compute threads; 0: one per processor that this process may use."""
    max_state_snapshots: int | None = None
    """Models with recurrent state: places for saved states; None: see ``default_snapshots``."""
    state_snapshot_interval_tokens: int | None = None
    """Models with recurrent state: tokens between two saved states of a sequence."""

    def check_sizes(self) -> None:
        """Raises ConfigurationError for the options of this class."""
        check_int("max_batch_size", self.max_batch_size, 1, 1 << 16)
        check_int("max_batch_tokens", self.max_batch_tokens, 1, 1 << 20)
        check_int("threads", self.threads, 0, 1024)
        check_state_options(self.max_state_snapshots, self.state_snapshot_interval_tokens)
        if self.max_seq_len is not None:
            check_int("max_seq_len", self.max_seq_len, 2, 1 << 24)
        if self.num_blocks is not None:
            check_int("num_blocks", self.num_blocks, 1, _INT32_MAX // BLOCK_SIZE)
        if self.kv_cache_tokens is not None:
            check_int("kv_cache_tokens", self.kv_cache_tokens, BLOCK_SIZE, _INT32_MAX)
        if self.num_blocks is not None and self.kv_cache_tokens is not None:
            raise ConfigurationError("num_blocks and kv_cache_tokens: give one of them, not both")

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> Self:
        """Unknown names are refused: a misspelt limit would otherwise be silently ignored."""
        known = {item.name for item in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigurationError(
                    f"options: unknown name {short_repr(name)}; {cls.BACKEND} has "
                    f"{', '.join(sorted(known))}"
                )
        return cls(**options)  # type: ignore[arg-type]

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


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raises ConfigurationError unless ``value`` is an integer from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(
            f"{name}: got {short_repr(value)}; must be an integer from {low} to {high}"
        )


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ConfigurationError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ConfigurationError(
            f"{name}: got {short_repr(value)}; must be one of {', '.join(allowed)}"
        )
