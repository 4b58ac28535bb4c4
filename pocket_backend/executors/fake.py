"""A deterministic executor without a model, for tests, simulations and front-end work.

The next token is a hash of every (position, token) pair of the sequence, *read back through the
slot's block table* from simulated KV blocks. So any mistake in ids of blocks or slots, in copies,
or in what counts as computed changes the output or is reported, and equal sequences always continue
equally, whatever shares their steps: the fake is batch-invariant like the real engine. With
``recurrent`` it depends on a state of the slot as well, as that of a hybrid model does.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from pocket_backend.api import BackendUnavailableError, ConfigurationError, EngineError
from pocket_backend.core.step import ExecuteOutput, ExecuteRequest, MemoryInfo, TokenLogprobs
from pocket_backend.core.swap import BlockSwaps
from pocket_backend.executors.base import BackendExecutor
from pocket_backend.executors.fake_state import STATE_BYTES, FakeStates

_UNWRITTEN = -1
_POSITION_SHIFT = 32
DEFAULT_FEATURES = frozenset(
    {"batch_mode", "prefix_cache", "block_copies", "min_tokens", "logprobs"}
)


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """Sizes and the chance of an end-of-sequence token."""

    num_blocks: int = 1024
    block_size: int = 16
    max_slots: int = 16
    max_context: int = 4096
    max_batch_tokens: int = 512
    vocab_size: int = 256
    eos_token_id: int = 0
    eos_probability: float = 0.0
    delay_seconds: float = 0.0
    """Time that a step takes (the GIL is released)."""
    features: frozenset[str] = DEFAULT_FEATURES
    num_swap_slots: int = 0
    """Places for blocks outside the pool; more than 0 adds the feature ``swap``."""
    recurrent: bool = False
    """Keep a state per slot, too (feature ``recurrent_state``)."""
    max_state_snapshots: int = 8
    state_snapshot_interval_tokens: int = 0
    """0: the scheduler's default."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_slots", "max_context", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}: got {getattr(self, name)}; must be at least 1")
        for name in ("num_swap_slots", "max_state_snapshots", "state_snapshot_interval_tokens"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}: got {getattr(self, name)}; must be at least 0")
        if self.vocab_size < 2 or not 0 <= self.eos_token_id < self.vocab_size:
            raise ConfigurationError(
                f"eos_token_id: got {self.eos_token_id}; must be below vocab_size "
                f"({self.vocab_size}), which must be at least 2"
            )
        if not 0.0 <= self.eos_probability <= 1.0:
            raise ConfigurationError(
                f"eos_probability: got {self.eos_probability}; must be from 0 to 1"
            )

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> FakeOptions:
        """Build from ``EngineArgs.backend_options``; unknown names are refused."""
        known = {item.name for item in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigurationError(
                    f"backend_options: unknown name {name!r}; the fake backend has "
                    f"{', '.join(sorted(known))}"
                )
        return cls(**options)  # type: ignore[arg-type]


@dataclass(slots=True)
class Faults:
    """What goes wrong, changeable while the engine runs (read once per step)."""

    failing_requests: set[str] = field(default_factory=set)
    """These requests fail alone, with a message."""
    nan_requests: set[str] = field(default_factory=set)
    """These requests' logits hold a NaN."""
    failing_steps: int = 0
    """So many steps raise; counts down."""
    dead: bool = False
    """Every step raises ``BackendUnavailableError``."""
    before_step: Callable[[Sequence[ExecuteRequest]], None] | None = None
    """Called first; may block, record or raise."""


@dataclass(slots=True)
class _Slot:
    request_id: str
    block_ids: list[int]


class FakeExecutor(BackendExecutor):
    """See the module. ``steps`` counts the calls, ``computed_tokens`` the tokens they computed."""

    def __init__(self, options: FakeOptions | None = None) -> None:
        self.options = options or FakeOptions()
        self.faults = Faults()
        self.steps = 0
        self.computed_tokens = 0
        self.closed = False
        o = self.options
        # (position << 32 | token) of what was last written to each place.
        self._kv = np.full((o.num_blocks, o.block_size), _UNWRITTEN, dtype=np.int64)
        self._swapped = np.full((o.num_swap_slots, o.block_size), _UNWRITTEN, dtype=np.int64)
        self._slots: dict[int, _Slot] = {}
        self._states = FakeStates(o.max_state_snapshots) if o.recurrent else None

    def get_memory_info(self) -> MemoryInfo:
        o = self.options
        return MemoryInfo(
            num_blocks=o.num_blocks,
            block_size=o.block_size,
            max_slots=o.max_slots,
            max_context=o.max_context,
            max_batch_tokens=o.max_batch_tokens,
            vocab_size=o.vocab_size,
            kv_cache_bytes=self._kv.nbytes,
            state_bytes=STATE_BYTES if o.recurrent else 0,
            num_state_snapshots=o.max_state_snapshots if o.recurrent else 0,
            state_snapshot_interval=o.state_snapshot_interval_tokens if o.recurrent else 0,
        )

    def supports_feature(self, feature: str) -> bool:
        if feature == "swap":
            return self.num_swap_slots > 0
        if feature == "recurrent_state":
            return self._states is not None
        return feature in self.options.features

    @property
    def num_swap_slots(self) -> int:
        return self.options.num_swap_slots

    def swap_blocks(self, swaps: BlockSwaps) -> None:
        o = self.options
        moves = [*swaps.out, *((block, place) for place, block in swaps.back)]
        for block, place in moves:
            if not (0 <= block < o.num_blocks and 0 <= place < o.num_swap_slots):
                raise EngineError(f"swap of block {block} and place {place}: out of range")
        for block, place in swaps.out:
            self._swapped[place] = self._kv[block]
        for place, block in swaps.back:
            self._kv[block] = self._swapped[place]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({self.options.eos_token_id})

    def reset_slot(self, slot_id: int) -> None:
        self._slots.pop(slot_id, None)
        if self._states is not None:
            self._states.reset(slot_id)

    def close(self) -> None:
        self.closed = True
        self._slots.clear()

    @property
    def occupied_slots(self) -> frozenset[int]:
        """Slots with a block table: empty when every sequence was reset."""
        return frozenset(self._slots)

    def execute_model(self, requests: Sequence[ExecuteRequest]) -> Sequence[ExecuteOutput]:
        if self.closed:
            raise EngineError("execute_model after close")
        self.steps += 1
        if self.options.delay_seconds:
            time.sleep(self.options.delay_seconds)
        if self.faults.before_step is not None:
            self.faults.before_step(requests)
        if self.faults.dead:
            raise BackendUnavailableError("the fake executor is dead")
        self._check_step(requests)
        if self._states is not None:
            self._states.begin(requests)
        for request in requests:
            for source, target in request.block_copies:
                self._kv[target] = self._kv[source]
        for request in requests:
            self._write(request)
        if self.faults.failing_steps > 0:
            self.faults.failing_steps -= 1
            self._scribble(requests)
            raise EngineError("the fake step was told to fail")
        return [self._output(request) for request in requests]

    def _check_step(self, requests: Sequence[ExecuteRequest]) -> None:
        """The contract of ``core/step.py``; a breach is the scheduler's bug and fails the step."""
        o = self.options
        tokens = sum(len(request.token_ids) for request in requests)
        if not 0 < tokens <= o.max_batch_tokens:
            raise EngineError(f"step of {tokens} tokens; allowed are 1 to {o.max_batch_tokens}")
        slots = [request.slot_id for request in requests]
        if len(set(slots)) != len(slots) or not all(0 <= slot < o.max_slots for slot in slots):
            raise EngineError(f"slots {slots} are repeated or beyond {o.max_slots}")
        for request in requests:
            slot = self._slots.get(request.slot_id)
            if request.is_new:
                slot = _Slot(request.request_id, list(request.block_ids))
                self._slots[request.slot_id] = slot
            elif slot is None or slot.request_id != request.request_id:
                raise EngineError(
                    f"slot {request.slot_id} does not hold request {request.request_id!r}"
                )
            else:
                slot.block_ids.extend(request.block_ids)
            end = request.start_position + len(request.token_ids)
            if not request.token_ids or not end <= len(slot.block_ids) * o.block_size:
                raise EngineError(
                    f"request {request.request_id!r}: {len(request.token_ids)} tokens up to "
                    f"position {end} in {len(slot.block_ids)} blocks"
                )
            if end > o.max_context:
                raise EngineError(f"request {request.request_id!r}: position {end} beyond context")

    def _places(self, request: ExecuteRequest, begin: int, end: int) -> tuple[object, object]:
        """Index arrays (block, offset) of positions ``begin .. end - 1``."""
        positions = np.arange(begin, end)
        table = np.asarray(self._slots[request.slot_id].block_ids)
        return table[positions // self.options.block_size], positions % self.options.block_size

    def _write(self, request: ExecuteRequest) -> None:
        begin, end = request.start_position, request.start_position + len(request.token_ids)
        values = (np.arange(begin, end) << _POSITION_SHIFT) | np.asarray(request.token_ids)
        self._kv[self._places(request, begin, end)] = values

    def _scribble(self, requests: Sequence[ExecuteRequest]) -> None:
        """After a failed step nothing that it wrote may be relied on: make sure of it."""
        for request in requests:
            begin = request.start_position
            places = self._places(request, begin, begin + len(request.token_ids))
            self._kv[places] = _UNWRITTEN
        if self._states is not None:
            self._states.lose(requests)

    def _output(self, request: ExecuteRequest) -> ExecuteOutput:
        name = request.request_id
        if name in self.faults.failing_requests:
            return ExecuteOutput(name, None, finish_reason="error", error="told to fail")
        if name in self.faults.nan_requests:
            return ExecuteOutput(name, None, finish_reason="error", error="logits hold a NaN")
        end = request.start_position + len(request.token_ids)
        content = self._kv[self._places(request, 0, end)]  # type: ignore[index]
        wrong = np.flatnonzero(content >> _POSITION_SHIFT != np.arange(end))
        if wrong.size:
            at = int(wrong[0])
            return ExecuteOutput(
                name,
                None,
                finish_reason="error",
                error=f"KV of position {at} holds position {int(content[at]) >> _POSITION_SHIFT}",
            )
        self.computed_tokens += len(request.token_ids)
        seen = content.tobytes()
        if self._states is not None:
            seen += self._states.advance(request)
            self._states.save(request)
        if not request.samples:
            return ExecuteOutput(name, None)
        token = self._next_token(seen, request)
        wanted = request.sampling_params.logprobs
        logprobs = None
        if wanted is not None:
            top = {(token + k) % self.options.vocab_size: -0.5 - k for k in range(wanted)}
            logprobs = TokenLogprobs(token_logprob=-0.5, top=top)
        return ExecuteOutput(name, token, logprobs=logprobs)

    def _next_token(self, content: bytes, request: ExecuteRequest) -> int:
        params, o = request.sampling_params, self.options
        salt = b""
        if not params.greedy:
            salt = f"{request.seed % 2**64}:{request.output_index}:{params.temperature}".encode()
        banned = set()
        if request.output_index < params.min_tokens:
            banned = {o.eos_token_id, *params.stop_token_ids}
        for attempt in range(64):
            hasher = hashlib.blake2b(content, digest_size=16)
            hasher.update(salt)
            hasher.update(bytes([attempt]))
            digest = hasher.digest()
            draw = int.from_bytes(digest[:8], "little") / 2**64
            if draw < o.eos_probability:
                token = o.eos_token_id
            else:  # any id but the end-of-sequence one
                token = int.from_bytes(digest[8:], "little") % (o.vocab_size - 1)
                token += token >= o.eos_token_id
            if token not in banned:
                return token
        return min(set(range(o.vocab_size)) - banned, default=o.eos_token_id)
