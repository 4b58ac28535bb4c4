"""Whatever is submitted, cancelled and broken in whatever order: every request ends exactly once,
what survives has the tokens of its lonely run, and everything is free afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pocket_backend.api import GenerationRequest, SamplingParams, TokenEvent
from pocket_backend.engine.entries import RequestEntry
from pocket_backend.engine.stepper import EngineStepper
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.fake import FakeExecutor, FakeOptions
from pocket_backend.executors.fake_tokenizer import FakeTokenizer

OPTIONS = FakeOptions(
    num_blocks=24,
    block_size=4,
    max_slots=4,
    max_context=64,
    max_batch_tokens=12,
    vocab_size=64,
    eos_probability=0.04,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def build(clock: Clock) -> tuple[EngineStepper, FakeExecutor]:
    executor = FakeExecutor(OPTIONS)
    stepper = EngineStepper.build(
        executor,
        max_batch_size=4,
        max_total_tokens=OPTIONS.num_blocks * OPTIONS.block_size,
        max_num_batched_tokens=None,
        max_model_len=OPTIONS.max_context,
        max_queue=6,
        eos_token_ids=executor.eos_token_ids,
        enable_prefix_caching=True,
        default_deadline_seconds=None,
        token_bytes=FakeTokenizer(OPTIONS.vocab_size).token_bytes,
        failure_limit=10**9,
        clock=clock,
    )
    return stepper, executor


@dataclass
class Ledger:
    """One request's account."""

    request: GenerationRequest
    entry: RequestEntry | None = None
    events: list[TokenEvent] = field(default_factory=list)
    broken_sink: bool = False
    raised: bool = False

    def sink(self, event: TokenEvent) -> None:
        assert not self.ended, "an event after the last one"
        assert not self.raised, "an event after the sink raised"
        self.events.append(event)
        if self.broken_sink:
            self.raised = True
            raise RuntimeError("client gone")

    @property
    def ended(self) -> bool:
        return any(event.last for event in self.events)

    def tokens(self, choice: int) -> tuple[int, ...]:
        return tuple(t for e in self.events if e.choice_index == choice for t in e.token_ids)


REFERENCE: dict[tuple[object, ...], tuple[int, ...]] = {}


def alone(request: GenerationRequest, choice: int) -> tuple[int, ...]:
    """Tokens of one choice, run by itself with no faults."""
    p = request.sampling_params
    key = (request.prompt_tokens, p, choice)
    if key not in REFERENCE:
        stepper, _ = build(Clock())
        ledger = Ledger(request)
        stepper.add(stepper.entry(request, ledger.sink))
        while stepper.step(lambda: None):
            pass
        for index in range(p.n):
            REFERENCE[request.prompt_tokens, p, index] = ledger.tokens(index)
    return REFERENCE[key]


# Few distinct prompts with common beginnings, so that prefixes are shared and references reused.
PROMPTS = st.builds(
    lambda shared, own: (*range(1, 1 + shared), 40 + own),
    st.sampled_from((0, 3, 8, 17)),
    st.integers(0, 3),
)
PARAMS = st.builds(
    lambda max_tokens, temperature, n, stop: SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=7, n=n, stop=stop
    ),
    st.sampled_from((1, 2, 9, 30)),
    st.sampled_from((0.0, 1.0)),
    st.sampled_from((1, 1, 1, 3)),
    st.sampled_from(((), ("\x05",), ("0",))),
)


class EngineLedger(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.stepper, self.executor = build(self.clock)
        self.ledgers: list[Ledger] = []
        self.pending: list[RequestEntry] = []

    @rule(
        prompt=PROMPTS,
        params=PARAMS,
        deadline=st.sampled_from((None, None, 2.0)),
        broken=st.sampled_from((False, False, False, True)),
    )
    def submit(
        self, prompt: tuple[int, ...], params: SamplingParams, deadline: float | None, broken: bool
    ) -> None:
        name = f"r{len(self.ledgers)}"
        ledger = Ledger(GenerationRequest(name, prompt, params, deadline_seconds=deadline))
        ledger.broken_sink = broken
        ledger.entry = self.stepper.entry(ledger.request, ledger.sink)
        self.stepper.add(ledger.entry)
        self.ledgers.append(ledger)

    @precondition(lambda self: self.ledgers)
    @rule(index=st.integers(0, 10**6))
    def cancel(self, index: int) -> None:
        entry = self.ledgers[index % len(self.ledgers)].entry
        assert entry is not None
        self.stepper.cancel(entry)

    @precondition(lambda self: self.ledgers)
    @rule(index=st.integers(0, 10**6))
    def break_one(self, index: int) -> None:
        name = self.ledgers[index % len(self.ledgers)].request.request_id
        self.executor.faults.failing_requests.add(name)

    @rule(count=st.integers(1, 2))
    def break_steps(self, count: int) -> None:
        self.executor.faults.failing_steps = count

    @rule(seconds=st.sampled_from((0.1, 1.0, 3.0)))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(count=st.integers(1, 8), index=st.integers(0, 10**6), during=st.booleans())
    def step(self, count: int, index: int, during: bool) -> None:
        """Some steps; with ``during`` a cancellation arrives while the first one computes."""
        for number in range(count):

            def drain(number: int = number) -> None:
                if during and number == 0 and self.ledgers:
                    self.cancel(index)

            self.stepper.step(drain)

    @invariant()
    def accounting(self) -> None:
        self.stepper.scheduler.check_integrity()
        ended = sum(ledger.ended or ledger.raised for ledger in self.ledgers)
        assert sum(self.stepper.counters.requests.values()) == ended

    def teardown(self) -> None:
        self.executor.faults.failing_steps = 0
        steps = 0
        while self.stepper.step(lambda: None):
            steps += 1
            assert steps < 10_000, "no end"
        self.stepper.idle()
        for ledger in self.ledgers:
            assert ledger.ended or ledger.raised, ledger.request.request_id
            self._check_output(ledger)
        stats = self.stepper.stats
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert stats.slots_free == stats.slots_total
        assert stats.integrity_failures == 0
        assert not self.executor.occupied_slots

    def _check_output(self, ledger: Ledger) -> None:
        if ledger.raised:
            return
        for choice in range(ledger.request.sampling_params.n):
            ends = [e for e in ledger.events if e.choice_index == choice and e.finish_reason]
            assert len(ends) == 1
            expected = alone(ledger.request, choice)
            if ends[0].finish_reason in ("stop", "length"):
                assert ledger.tokens(choice) == expected
            else:
                assert ledger.tokens(choice) == expected[: len(ledger.tokens(choice))]


def test_every_request_ends_exactly_once() -> None:
    run_state_machine_as_test(
        EngineLedger,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(PROMPTS, st.integers(1, 12), st.sampled_from(("run", "cancel", "fail"))),
        min_size=1,
        max_size=12,
    )
)
def test_the_same_with_real_threads(work: list[tuple[tuple[int, ...], int, str]]) -> None:
    executor = FakeExecutor(OPTIONS)
    with UnifiedEngine(executor, max_batch_size=4, max_total_tokens=96) as engine:
        streams = []
        for index, (prompt, max_tokens, fate) in enumerate(work):
            name = f"r{index}"
            if fate == "fail":
                executor.faults.failing_requests.add(name)
            params = SamplingParams(max_tokens=max_tokens)
            streams.append(engine.stream(GenerationRequest(name, prompt, params)))
            if fate == "cancel":
                engine.cancel(name)
        ends = [list(stream)[-1] for stream in streams]
    for (_, _, fate), end in zip(work, ends, strict=True):
        allowed = {"run": {"length", "stop"}, "fail": {"error"}}
        assert end.last
        assert end.finish_reason in allowed.get(fate, {"length", "stop", "cancelled"})
    assert executor.closed
