"""Hypothesis drives the scheduler with everything a server can meet, and checks every step.

Each step: free + in use + cached = total; the budget is kept; every decode is in the step; every KV
position that is read was written for exactly these tokens; each token is computed once unless its
sequence was preempted or its step failed; admission keeps the order of the policy. At the end every
request finishes, with the output that it has alone in the world.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from recurrent_oracle import RecurrentSimulator, check_snapshots
from scheduler_oracle import EOS, VOCAB, KvSimulator, Run, expected_output

from pocket_backend.api import InvalidRequestError, OverloadedError, SamplingParams
from pocket_backend.core import (
    ContinuousBatchScheduler,
    ExecuteRequest,
    MemoryInfo,
    RequestStatus,
    ScheduledRequest,
    SchedulerConfig,
    StepPlan,
)
from pocket_backend.core.admission import token_limit

_STEMS = [tuple((stem * 17 + i * (stem + 1)) % VOCAB for i in range(40)) for stem in range(2)]
_MAX_QUEUE = 12


class SchedulerMachine(RuleBasedStateMachine):
    simulator = KvSimulator

    # Settings and requests are drawn from a seed by ``random``: Hypothesis itself prefers small and
    # equal values so strongly that prefixes would hardly ever be shared while blocks are scarce.

    @initialize(seed=st.integers(0, 2**20))
    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        memory = self.sizes(rng)
        self.config = SchedulerConfig(
            policy=rng.choice(["priority", "fcfs", "lpm"]),
            max_queue=_MAX_QUEUE,
            enable_prefix_cache=rng.random() < 0.8,
            eviction=rng.choice(["lru", "lfu", "fifo"]),
            prefix_wait_steps=rng.choice([0, 2, 64]),
            block_copies=rng.random() < 0.7,
            reserved_share=rng.choice([0.0, 0.25, 0.9]),
            lpm_window=3,
            lpm_max_overtakes=2,
        )
        scheduler = ContinuousBatchScheduler(memory, self.config, eos_token_ids=[EOS])
        self.run = Run(scheduler, simulator=self.simulator)
        self.limit = token_limit(memory)
        self.count = 0
        self.sequences: list[ScheduledRequest] = []
        self.computed_to: dict[ScheduledRequest, int] = {}
        self.broken = False
        self.disturbed = False
        """A step failed: from then on tokens may be computed twice."""

    def sizes(self, rng: random.Random) -> MemoryInfo:
        return MemoryInfo(
            num_blocks=rng.randint(4, 40),
            block_size=rng.randint(1, 5),
            max_slots=rng.randint(1, 5),
            max_context=rng.randint(20, 80),
            max_batch_tokens=rng.randint(1, 24),
            vocab_size=VOCAB,
        )

    # -- what a server meets ------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**20), burst=st.integers(1, 6))
    def add(self, seed: int, burst: int) -> None:
        rng = random.Random(seed)
        stem = rng.choice(_STEMS)[: rng.randint(0, 40)]
        for _ in range(burst):
            self._add_one(rng, stem)

    def _add_one(self, rng: random.Random, stem: tuple[int, ...]) -> None:
        prompt = (*stem, *(rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))))
        max_tokens = rng.choice([None, rng.randint(1, 25), rng.randint(1, 25)])
        min_tokens = rng.choice([0, 0, 3])
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
            n=rng.choice([1, 1, 1, 2, 3]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.choice([(), (7, 8, 9)]),
            seed=rng.choice([None, 0, 1]),
        )
        self.count += 1
        request = ScheduledRequest(
            f"r{self.count}",
            prompt,
            sampling_params=params,
            priority=rng.choice([0, 0, -1, 5]),
            cache_salt=rng.choice(["", "", "", "tenant"]),
            deadline_seconds=rng.choice([None] * 9 + [0.02]),
        )
        scheduler = self.run.scheduler
        try:
            scheduler.add_request(request, self.run.now)
        except InvalidRequestError:
            assert not 0 < len(prompt) < self.limit
        except OverloadedError:
            assert scheduler.stats().waiting >= _MAX_QUEUE
        else:
            assert 0 < len(prompt) < self.limit
            assert request.group is not None
            self.sequences += request.group.sequences

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            self._step()

    @rule(fails=st.sampled_from([False, False, True]))
    def step_may_raise(self, fails: bool) -> None:
        self.disturbed |= fails
        self._step(fail=fails)

    @rule(which=st.integers(0, 10))
    def step_with_one_failure(self, which: int) -> None:
        running = list(self.run.scheduler._life.running)
        names = {running[which % len(running)].sequence_id} if running else set()
        self._step(errors=frozenset(names))

    @rule(which=st.integers(0, 30), in_flight=st.booleans())
    def cancel(self, which: int, in_flight: bool) -> None:
        names = list(self.run.scheduler._life.groups)
        if not names:
            return
        name = names[which % len(names)]

        def act(_: StepPlan | None) -> None:
            expected = name in self.run.scheduler._life.groups
            assert self.run.scheduler.cancel(name) == expected
            assert not self.run.scheduler.cancel(name)

        if in_flight:
            self._step(during=act)
        else:
            act(None)
        assert name not in self.run.scheduler._life.groups

    @rule(which=st.integers(0, 30))
    def finish_by_stop_string(self, which: int) -> None:
        live = [s for s in self.sequences if s.status is not RequestStatus.FINISHED]
        if live:
            sequence = live[which % len(live)]
            scheduler = self.run.scheduler
            assert scheduler.finish(sequence.request_id, "stop", sequence.choice_index)
            assert not scheduler.finish(sequence.request_id, "stop", sequence.choice_index)

    @rule()
    def let_time_pass(self) -> None:
        self.run.now += 0.05

    @rule(really=st.sampled_from([False, False, True]))
    def clear_cache(self, really: bool) -> None:
        if not really:
            return
        self.run.scheduler.clear_prefix_cache()
        assert self.run.scheduler.stats().blocks.cached_only == 0

    # -- checks -------------------------------------------------------------------------------

    def _step(self, **how: object) -> None:
        run, life = self.run, self.run.scheduler._life
        suspects = bool(life.suspects)
        before = {s: s.num_preemptions for s in self.sequences}
        running_before = set(life.running)
        queued_before = {s: s.order for s in life.queue}
        during = how.pop("during", None)

        def check(plan: StepPlan) -> None:
            # Nothing has been updated yet: the state is what the plan was made of.
            self._check_plan(plan, suspects, before, running_before, queued_before)
            if callable(during):
                during(plan)

        self.broken = True  # until the step is through
        plan = run.step(during=check, **how)  # type: ignore[arg-type]
        self.broken = False
        if plan is None:
            assert not run.scheduler.has_work()
            return
        for request, sequence in zip(plan.requests, plan.sequences, strict=True):
            done = 0 if how.get("fail") else len(request.token_ids)
            self.computed_to[sequence] = request.start_position + done

    def _check_plan(
        self,
        plan: StepPlan,
        suspects: bool,
        preemptions: dict[ScheduledRequest, int],
        running_before: set[ScheduledRequest],
        queued_before: dict[ScheduledRequest, tuple[float, int, int]],
    ) -> None:
        scheduler, life = self.run.scheduler, self.run.scheduler._life
        assert plan.num_tokens == sum(len(r.token_ids) for r in plan.requests)
        assert len(life.running) <= scheduler.memory.max_slots
        in_plan = set(plan.sequences)
        for request, sequence in zip(plan.requests, plan.sequences, strict=True):
            begin = request.start_position
            assert begin == sequence.num_computed_tokens
            if sequence in running_before and sequence.num_preemptions == preemptions[sequence]:
                # Goes on where it stopped: no token twice, none left out.
                self._check_goes_on(request, begin, self.computed_to.get(sequence, begin))
            else:
                assert request.is_new
                assert begin % scheduler.memory.block_size == 0 or sequence.choice_index
        preempted = [s.order for s in running_before if s.num_preemptions > preemptions[s]]
        kept = [s.order for s in running_before if s in life.running]
        assert not preempted or not kept or min(preempted) > max(kept)
        if not suspects:
            for sequence in life.running:
                if len(sequence.tokens) - sequence.num_computed_tokens == 1:
                    assert sequence in in_plan, "a decode was left out"
        if self.config.policy != "lpm":
            started = [s for s in queued_before if s in life.running]
            left = [s.order for s in life.queue if s in queued_before]
            assert not left or not started or max(s.order for s in started) < min(left)

    def _check_goes_on(self, request: ExecuteRequest, begin: int, computed: int) -> None:
        assert begin == computed
        assert not request.is_new or self.disturbed

    @invariant()
    def books_balance(self) -> None:
        scheduler = self.run.scheduler
        scheduler.check_integrity()
        stats = scheduler.stats()
        blocks = stats.blocks
        assert blocks.free + blocks.in_use + blocks.cached_only == blocks.total
        assert stats.prefix_hit_tokens <= stats.prefix_query_tokens
        if not self.config.enable_prefix_cache:
            assert blocks.cached_only == stats.prefix_hit_tokens == 0
        for sequence in self.sequences:
            assert sequence.waited_steps <= self.config.prefix_wait_steps

    def teardown(self) -> None:
        if not hasattr(self, "run") or self.broken:
            return
        self.run.drain(5000)
        stats = self.run.scheduler.stats()
        # Shown by --hypothesis-show-statistics: what share of the examples met what.
        for name, count in (
            ("preemption", stats.preemptions),
            ("prefix hit", stats.prefix_hit_tokens),
            ("eviction", stats.evicted_blocks),
            ("copy on write", self.run.kv.copies),
            ("held back for a prefix", sum(s.waited_steps for s in self.sequences)),
            ("failed step", self.run.kv.failures),
            ("cancelled", stats.finished.get("cancelled", 0)),
            ("deadline or failure", stats.finished.get("error", 0)),
        ):
            if count:
                event(name)
        assert stats.blocks.in_use == 0
        assert stats.free_slots == self.run.scheduler.memory.max_slots
        assert stats.running == stats.waiting == 0
        assert sum(stats.finished.values()) == len(self.sequences)
        self.run.scheduler.check_integrity()
        for sequence in self.sequences:
            assert sequence.status is RequestStatus.FINISHED
            delivered = self.run.outputs.get((sequence.request_id, sequence.choice_index), [])
            assert delivered == list(sequence.generated_tokens)
            wanted, reason = expected_output(
                sequence.prompt_tokens, sequence.sampling_params, sequence.seed, self.limit
            )
            end = self.run.ends.get((sequence.request_id, sequence.choice_index))
            if end is not None and end.finish_reason in ("stop", "length"):
                assert (delivered, end.finish_reason) == (wanted, reason)
            else:
                assert delivered == wanted[: len(delivered)]


class RecurrentSchedulerMachine(SchedulerMachine):
    """The same for a model with recurrent state, with any number of snapshots from none."""

    simulator = RecurrentSimulator

    def sizes(self, rng: random.Random) -> MemoryInfo:
        return replace(
            super().sizes(rng),
            state_bytes=1,
            num_state_snapshots=rng.choice([0, 1, 1, 2, 3, 5, 40]),
            state_snapshot_interval=rng.choice([0, 1, 3, 8, 20]),
        )

    def _check_goes_on(self, request: ExecuteRequest, begin: int, computed: int) -> None:
        if not request.is_new:
            assert begin == computed
            return
        # After a failed step, from its best snapshot.
        assert self.disturbed
        assert begin <= computed

    @invariant()
    def snapshots_hold_their_prefix(self) -> None:
        kv = self.run.kv
        assert isinstance(kv, RecurrentSimulator)
        check_snapshots(self.run.scheduler, kv)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "run"):
            kv = self.run.kv
            assert isinstance(kv, RecurrentSimulator)
            assert not kv.copies
            for name, count in (("snapshot saved", kv.saves), ("snapshot loaded", kv.loads)):
                if count:
                    event(name)


SchedulerMachine.TestCase.settings = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    # Shrinking takes minutes here; delete this line to get the smallest failing example.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestScheduler = SchedulerMachine.TestCase
TestRecurrentScheduler = RecurrentSchedulerMachine.TestCase
TestRecurrentScheduler.settings = settings(TestScheduler.settings, max_examples=100)
