"""The contract between scheduler and executor: plain data of integers, not changed once made.

One call of ``BackendExecutor.execute_model`` runs a mixed batch: prefill chunks and decodes
together. The first four method names of ``BackendExecutor`` and these fields are given:
``request_id, token_ids, slot_id, is_prefill, sampling_params, prefix_hash`` and ``request_id,
token_id, logprobs, finish_reason``; the rest is what paging, mixed batches, forks and speculation
need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pocket_backend.api.sampling_params import SamplingParams


@dataclass(slots=True)
class ExecuteRequest:
    """One sequence's share of a step. Not changed once made.

    Not frozen, since one is made per running sequence and step and a frozen one costs six times as
    much to make: a third of the scheduler's time per token.

    The executor keeps a block table per slot. ``is_new`` replaces the slot's whole table by
    ``block_ids`` (admission, resumption after preemption); otherwise ``block_ids`` is appended
    (usually empty). Tokens are computed at positions ``start_position ...``; everything before is
    already in the KV blocks.
    """

    request_id: str
    token_ids: tuple[int, ...]
    """Tokens to compute in this step: a prefill chunk, or the last token (then drafts)."""
    slot_id: int
    is_prefill: bool
    sampling_params: SamplingParams
    prefix_hash: int | None = None
    start_position: int = 0
    is_new: bool = False
    block_ids: tuple[int, ...] = ()
    samples: bool = True
    """False for a chunk that does not reach the end of the known tokens: no token comes back."""
    output_index: int = 0
    """Index of the output token that will be sampled: the counter of its random stream."""
    seed: int = 0
    """Key of the request's random stream: the client's seed, or one drawn at admission."""
    num_draft_tokens: int = 0
    block_copies: tuple[tuple[int, int], ...] = ()
    """(from, to) blocks to copy before this step computes: copy on write of forked sequences."""
    known_tokens: Sequence[int] | None = None
    """With ``is_new``, when the parameters hold penalties or ask for log probabilities of the
    prompt: prompt and output so far (the last
    ``output_index`` tokens). The scheduler's own int32 array, for the duration of the step: the
    executor copies what it keeps. Later tokens come as ``token_ids``."""
    ending_ids: frozenset[int] = frozenset()
    """With ``is_new``, when the parameters hold ``min_tokens``: ids that would end the sequence and
    may not be sampled while ``output_index < min_tokens``."""

    never_ids: tuple[int, ...] = ()
    """With ``is_new``: ids that may not be sampled as long as the sequence lives, beside those of
    the parameters. The output stage's: core does not know texts."""
    banned_ids: tuple[int, ...] = ()
    """Ids that may not be sampled in this step; the output stage's as well."""
    state_source: int | None = None
    """Feature ``recurrent_state``, with ``is_new``: the snapshot that the slot's recurrent state is
    loaded from, the state after exactly the tokens before ``start_position``. None: the state is
    set to zero, and ``start_position`` is 0. Without ``is_new`` the slot's own state goes on."""
    state_target: int | None = None
    """Feature ``recurrent_state``: the snapshot that the slot's state is saved into after this
    step's tokens of this request. All sources of a step are read before any target is written, so
    one id may be both."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one output token under the raw (unprocessed) logits."""

    token_logprob: float
    top: Mapping[int, float] | None = None


@dataclass(slots=True)
class ExecuteOutput:
    """What came back for one ``ExecuteRequest``, in the same order. Not changed once made (and not
    frozen, for the reason above)."""

    request_id: str
    token_id: int | None
    """None when the request asked for no token (``samples=False``) or failed."""
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    """Set to ``"error"`` when only this request failed (its logits held a NaN, say)."""
    accepted_draft_tokens: tuple[int, ...] = ()
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """When the parameters ask for them: of the prompt's tokens at ``start_position + 1`` and on
    that this step predicted, each given all tokens before it."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Sizes that the block manager and admission are built from."""

    num_blocks: int
    block_size: int
    """Tokens per KV block."""
    max_slots: int
    """Sequences that can be resident at once; slot ids are 0 .. max_slots - 1."""
    max_context: int
    """Tokens (prompt and output) that one sequence may hold."""
    max_batch_tokens: int
    """Tokens that one step may compute."""
    vocab_size: int
    """Valid token ids are 0 .. vocab_size - 1 (the tokenizer's size, not the padded logits)."""
    kv_cache_bytes: int = 0
    weight_bytes: int = 0
    workspace_bytes: int = 0
    state_bytes: int = 0
    """Of one slot's recurrent and convolution state, and so of one snapshot; 0: the model has none
    (no feature ``recurrent_state``)."""
    num_state_snapshots: int = 0
    """Places for copies of a slot's state; ids are 0 .. num_state_snapshots - 1."""
    state_snapshot_interval: int = 0
    """Tokens between two snapshots of a sequence; 0: the scheduler's default."""
