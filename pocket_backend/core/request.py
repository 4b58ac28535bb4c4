"""One sequence's state while it is queued, runs, is preempted or has finished."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from pocket_backend.api.errors import InvalidRequestError
from pocket_backend.api.sampling_params import SamplingParams
from pocket_backend.kv.manager import SequenceBlocks
from pocket_backend.kv.radix import Namespace

if TYPE_CHECKING:
    from pocket_backend.api.types import GenerationRequest

NO_SLOT = -1
NO_TOKENS_STOP: frozenset[int] = frozenset()


class RequestStatus(Enum):
    """WAITING -> RUNNING -> FINISHED; RUNNING -> PREEMPTED -> RUNNING as often as memory asks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    PREEMPTED = "preempted"


class ScheduledRequest:
    """A sequence: its known tokens and how many of them have KV.

    There are no phases. ``num_computed_tokens`` catches up with ``total_tokens``; a step that
    reaches it samples the next token. Preemption sets it back to 0, which makes the sequence an
    equivalent new one whose prompt includes its output; ``output_index`` and ``seed`` go on, so it
    samples the same tokens.

    The scheduler changes it; everyone else reads. ``generated_tokens`` may be given for a sequence
    that was begun elsewhere (migration).

    Raises:
        InvalidRequestError: the tokens are not integers that fit in 32 bits.
    """

    __slots__ = (
        "adapter",
        "admitted",
        "arrival_time",
        "blocks",
        "cached_tokens",
        "choice_index",
        "deadline_seconds",
        "end_length",
        "finish_reason",
        "first_scheduled_time",
        "first_token_time",
        "group",
        "is_new",
        "min_length",
        "namespace",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sent_blocks",
        "order",
        "pending_copies",
        "prefix_hash",
        "priority",
        "redo_until",
        "request_id",
        "sampling_params",
        "seed",
        "sequence_id",
        "slot_id",
        "status",
        "stop_ids",
        "tokens",
        "wait_blocks",
        "wait_for",
        "waited_steps",
    )

    def __init__(
        self,
        request_id: str,
        prompt_tokens: Sequence[int],
        generated_tokens: Sequence[int] = (),
        status: RequestStatus = RequestStatus.WAITING,
        slot_id: int | None = None,
        arrival_time: float = 0.0,
        sampling_params: SamplingParams | None = None,
        prefix_hash: int | None = None,
        *,
        priority: int = 0,
        deadline_seconds: float | None = None,
        cache_salt: str = "",
        adapter: str = "",
        choice_index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.sequence_id = request_id
        """Unique among live sequences: the request id, with the choice's number if n > 1."""
        self.tokens = _token_array(prompt_tokens)
        """Known tokens, int32: prompt, then output. Append only."""
        self.num_prompt_tokens = len(self.tokens)
        self.tokens.extend(_token_array(generated_tokens))
        self.status = status
        self.slot_id = NO_SLOT if slot_id is None else slot_id
        self.arrival_time = arrival_time
        self.sampling_params = SamplingParams() if sampling_params is None else sampling_params
        self.prefix_hash = prefix_hash
        """Unused: the prefix tree compares tokens, so no hash has to be trusted."""
        self.priority = priority
        self.deadline_seconds = deadline_seconds
        self.adapter = adapter
        self.namespace = Namespace(cache_salt, adapter)
        self.choice_index = choice_index
        self.group: RequestGroup | None = None
        self.num_computed_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens that the first admission found in the prefix cache."""
        self.num_preemptions = 0
        self.redo_until = 0
        """Tokens that had been computed before the last preemption."""
        self.finish_reason: str | None = None
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        # Set by the scheduler when it accepts the request.
        self.order: tuple[float, int, int] = (0.0, 0, 0)
        """Rank by policy: smaller is served first and preempted last."""
        self.seed = 0
        self.stop_ids = NO_TOKENS_STOP
        self.min_length = 0
        """No stop token ends the sequence before it has this many tokens, prompt included."""
        self.end_length = 0
        """The sequence ends with "length" at this many tokens, prompt included."""
        self.admitted = False
        self.blocks: SequenceBlocks | None = None
        self.num_sent_blocks = 0
        self.is_new = True
        """Whether the executor needs the whole block table (again)."""
        self.pending_copies: tuple[tuple[int, int], ...] = ()
        # Held back until ``wait_for`` has ``wait_blocks`` cached blocks (scheduler, prefix wait).
        self.wait_for: SequenceBlocks | None = None
        self.wait_blocks = 0
        self.waited_steps = 0

    @classmethod
    def from_generation(cls, request: GenerationRequest) -> ScheduledRequest:
        return cls(
            request.request_id,
            request.prompt_tokens,
            sampling_params=request.sampling_params,
            priority=request.priority,
            deadline_seconds=request.deadline_seconds,
            cache_salt=request.cache_salt,
        )

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """A copy; O(prompt)."""
        return tuple(self.tokens[: self.num_prompt_tokens])

    @property
    def generated_tokens(self) -> tuple[int, ...]:
        """A copy; O(output)."""
        return tuple(self.tokens[self.num_prompt_tokens :])

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def total_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_prefill_phase(self) -> bool:
        """Whether more than the newest output token is still to be computed."""
        return (
            self.num_computed_tokens < len(self.tokens) - 1
            or len(self.tokens) == self.num_prompt_tokens
        )

    def __repr__(self) -> str:
        return (
            f"ScheduledRequest({self.sequence_id!r}, {self.status.value}, prompt="
            f"{self.num_prompt_tokens}, total={len(self.tokens)}, "
            f"computed={self.num_computed_tokens}, slot={self.slot_id})"
        )


class RequestGroup:
    """The ``n`` sequences of one client request.

    ``unborn`` ones wait until the first has computed the prompt, then fork from it.
    """

    __slots__ = ("request_id", "sequences", "unborn")

    def __init__(self, request_id: str, sequences: list[ScheduledRequest]) -> None:
        self.request_id = request_id
        self.sequences = sequences
        self.unborn = sequences[1:]

    @property
    def finished(self) -> bool:
        return all(s.status is RequestStatus.FINISHED for s in self.sequences)


def _token_array(tokens: Iterable[int]) -> array[int]:
    try:
        return array("i", tokens)
    except (TypeError, OverflowError):
        raise InvalidRequestError(
            "prompt_tokens: every token id must be an integer that fits in 32 bits",
            field="prompt_tokens",
        ) from None
