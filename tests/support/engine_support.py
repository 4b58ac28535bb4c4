"""What the engine's tests share: engines on the fake executor, gates, and sequential references."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pocket_backend.api import GenerationRequest, SamplingParams, TokenEvent
from pocket_backend.core.step import ExecuteRequest
from pocket_backend.engine.stepper import EngineStepper
from pocket_backend.engine.streams import ResultCollector
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.fake import FakeExecutor, FakeOptions
from pocket_backend.executors.fake_tokenizer import FakeTokenizer

WAIT = 60.0
"""Seconds until a test gives up on another thread; never reached when all is well."""

SLOW = FakeOptions(delay_seconds=0.01)
"""Forty seconds for an answer without a limit: still there when it is cancelled."""


class ManualClock:
    """A clock that tests move by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Gate:
    """A ``before_step`` hook that stops the engine thread inside ``execute_model``."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, _requests: Sequence[ExecuteRequest]) -> None:
        self.entered.set()
        assert self.open.wait(WAIT)

    def wait_until_inside(self) -> None:
        assert self.entered.wait(WAIT)


class Recorder:
    """A sink that keeps events and notices a broken contract."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.done = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        assert not self.done.is_set(), "an event after the last one"
        self.events.append(event)
        if event.last:
            self.done.set()

    def wait(self) -> TokenEvent:
        assert self.done.wait(WAIT), "no last event"
        return self.events[-1]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for event in self.events for token in event.token_ids)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


def make_engine(
    options: FakeOptions | None = None, *, text: bool = False, **arguments: object
) -> tuple[UnifiedEngine, FakeExecutor]:
    executor = FakeExecutor(options)
    if text:
        arguments["tokenizer"] = FakeTokenizer(executor.options.vocab_size)
    return UnifiedEngine(executor, **arguments), executor  # type: ignore[arg-type]


def make_stepper(
    options: FakeOptions | None = None,
    *,
    clock: Callable[[], float] | None = None,
    text: bool = False,
    **changes: object,
) -> tuple[EngineStepper, FakeExecutor]:
    """A stepper to be driven by hand: no threads."""
    executor = FakeExecutor(options)
    o = executor.options
    arguments: dict[str, object] = {
        "max_batch_size": o.max_slots,
        "max_total_tokens": o.num_blocks * o.block_size,
        "max_num_batched_tokens": None,
        "max_model_len": o.max_context,
        "max_queue": 64,
        "eos_token_ids": executor.eos_token_ids,
        "enable_prefix_caching": True,
        "default_deadline_seconds": None,
        "token_bytes": FakeTokenizer(o.vocab_size).token_bytes if text else None,
        "failure_limit": 8,
        "clock": clock or ManualClock(),
    }
    return EngineStepper.build(executor, **{**arguments, **changes}), executor  # type: ignore[arg-type]


def request(
    request_id: str, prompt: Sequence[int], max_tokens: int | None = 8, **fields: object
) -> GenerationRequest:
    outer = {
        name: fields.pop(name)
        for name in ("priority", "deadline_seconds", "cache_salt")
        if name in fields
    }
    params = SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    return GenerationRequest(request_id, tuple(prompt), params, **outer)  # type: ignore[arg-type]


def alone(
    asked: GenerationRequest, options: FakeOptions | None = None, *, text: bool = False
) -> ResultCollector:
    """Run one request on an engine of its own, without threads: what it must always give."""
    stepper, _ = make_stepper(options, text=text)
    collector = ResultCollector()
    stepper.add(stepper.entry(asked, collector))
    while stepper.step(lambda: None):
        pass
    assert collector.finished
    return collector


def wait_until(condition: Callable[[], bool], what: str = "") -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, f"timed out: {what or condition}"
        time.sleep(0.001)


def assert_baseline(engine: UnifiedEngine, executor: FakeExecutor) -> None:
    """Everything is free again: slots, blocks, tables in the executor; accounting adds up."""

    def settled() -> bool:
        stats = engine.stats()
        return (
            stats.running == 0
            and stats.waiting == 0
            and stats.blocks_used == 0
            and stats.slots_free == stats.slots_total
            and not executor.occupied_slots
        )

    wait_until(settled, "slots and blocks back to baseline")
    stats = engine.stats()
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.integrity_failures == 0


def engine_threads() -> list[str]:
    """Names of the engines' threads that are alive."""
    return [t.name for t in threading.enumerate() if t.name.startswith("pocket-engine")]
