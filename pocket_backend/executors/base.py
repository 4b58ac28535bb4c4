"""What every executor offers to the engine loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from pocket_backend.api.capabilities import BackendCapabilities
from pocket_backend.api.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pocket_backend.core.step import ExecuteOutput, ExecuteRequest, MemoryInfo
    from pocket_backend.core.swap import BlockSwaps


class BackendExecutor(ABC):
    """Owns the weights and the *storage* of KV blocks; ``pocket_backend.kv`` owns their ids.

    Thread contract: all methods are called from the engine thread, one at a time, except
    ``supports_feature`` and ``get_memory_info``, which are safe from any thread once constructed.
    """

    @abstractmethod
    def execute_model(self, requests: Sequence[ExecuteRequest]) -> Sequence[ExecuteOutput]:
        """Run one mixed batch and return one output per request, in order.

        Releases the GIL while computing. A failure of a single request comes back as an output with
        ``finish_reason="error"``; an exception means that the whole step failed, and that neither
        KV beyond the requests' start positions, nor their slots' recurrent states, nor the
        snapshots they were to write may be relied on.
        """

    @abstractmethod
    def get_memory_info(self) -> MemoryInfo:
        """Sizes of the KV pool and limits of a step."""

    @abstractmethod
    def supports_feature(self, feature: str) -> bool:
        """Whether the executor honours ``feature``; unknown names are False.

        Names in use: ``batch_mode``, ``prefix_cache``, ``min_p``, ``min_tokens``, ``penalties``,
        ``logit_bias``, ``token_masks`` (bad and allowed token ids), ``bad_words`` (a step's
        ``never_ids`` and ``banned_ids``), ``logprobs``, ``prompt_logprobs``, ``n``,
        ``block_copies``, ``swap``, ``tensor_parallel``, ``recurrent_state`` (the model keeps a
        state per slot that blocks do not hold: ``state_source`` and ``state_target`` are honoured).
        """

    @abstractmethod
    def reset_slot(self, slot_id: int) -> None:
        """Forget the slot's block table (its sequence finished, was preempted or failed)."""

    @property
    def num_swap_slots(self) -> int:
        """Places for blocks outside the pool (feature ``swap``, see ``core/swap.py``); 0: none."""
        return 0

    def swap_blocks(self, swaps: BlockSwaps) -> None:  # noqa: ARG002  (optional hook)
        """Move blocks out of the pool and back (feature ``swap``).

        Called on the engine thread between two ``execute_model``; the next one sees the moves as
        done. If it raises, every target of ``swaps`` holds nothing that may be relied on, and the
        sequences concerned compute their KV again.

        Raises:
            EngineError: this executor does not swap, or an id is out of range.
        """
        raise EngineError(f"{type(self).__name__} does not swap blocks")

    @property
    def capabilities(self) -> BackendCapabilities:
        """What an engine on this executor can do; streaming and cancelling are the engine's."""
        return BackendCapabilities(
            name=type(self).__name__,
            supports_batch=self.supports_feature("batch_mode"),
            supports_streaming=True,
            supports_cancellation=True,
            supports_logprobs=self.supports_feature("logprobs"),
            supports_prefix_caching=self.supports_feature("prefix_cache"),
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a sequence, as far as the model file says; used without a tokenizer."""
        return frozenset()

    def close(self) -> None:  # noqa: B027  (optional hook)
        """Release weights and KV storage; no other call follows."""
