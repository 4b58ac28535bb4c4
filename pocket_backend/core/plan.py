"""What the scheduler tells the engine loop: a step to run, and what became of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pocket_backend.core.step import ExecuteRequest, TokenLogprobs
from pocket_backend.kv.manager import BlockUsage
from pocket_backend.kv.snapshots import SnapshotUsage

if TYPE_CHECKING:
    from pocket_backend.core.request import ScheduledRequest


@dataclass(slots=True)
class SequenceUpdate:
    """News of one sequence: new tokens, the end of it, or both. Not changed once returned.

    Not frozen, since one is made per running sequence and step and a frozen one costs three times
    as much to make.
    """

    request: ScheduledRequest
    token_ids: tuple[int, ...] = ()
    """New output tokens. A stop token is included."""
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    """``stop``, ``length``, ``error``, or None while the sequence goes on."""
    stop_reason: int | None = None
    """The id from ``stop_token_ids`` that ended the sequence; None for an end-of-sequence token."""
    error: Exception | None = None
    """Why, when ``finish_reason`` is ``error``."""
    request_done: bool = False
    """Whether this ended the last of the request's sequences."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def choice_index(self) -> int:
        return self.request.choice_index


@dataclass(slots=True)
class StepPlan:
    """One step. Not changed once made.

    The engine loop, in this order: reports ``finished``, calls ``reset_slot`` for each of
    ``reset_slots``, and, unless ``requests`` is empty, runs them and calls ``update``.
    """

    requests: tuple[ExecuteRequest, ...]
    sequences: tuple[ScheduledRequest, ...]
    """Whose share each of ``requests`` is, in the same order."""
    reset_slots: tuple[int, ...] = ()
    """Slots whose sequence has gone. A slot may be reset and reused in one step."""
    finished: tuple[SequenceUpdate, ...] = ()
    """Sequences that ended without running: their deadline passed."""
    num_tokens: int = 0
    """Tokens that the step computes."""
    num_prefill_tokens: int = 0
    num_admitted: int = 0
    num_preempted: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. Counters run since the start; tokens and sequences, no seconds."""

    running: int
    waiting: int
    """Queued sequences, including held-back and preempted ones, and unborn forks."""
    held_back: int
    """Of those, how many wait for a prefix that a running sequence is computing."""
    free_slots: int
    blocks: BlockUsage
    snapshots: SnapshotUsage
    steps: int
    admissions: int
    preemptions: int
    finished: Mapping[str, int]
    """Sequences by finish reason."""
    computed_tokens: int
    recomputed_tokens: int
    """Of those, tokens that had been computed before a preemption or a failed step."""
    prefix_query_tokens: int
    """Tokens of first admissions; resumptions after preemption do not count."""
    prefix_hit_tokens: int
    evicted_blocks: int
    stalled_schedules: int
    """Consecutive ``schedule`` calls that had work and ran nothing: the watchdog's figure."""
