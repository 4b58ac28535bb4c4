"""Public bug reports of systems like ours (S..), and the policy's promises, one test each.

All run on the simulated executor of ``scheduler_oracle``, which checks every KV position read, and
compare outputs with those of a sequence alone in the world.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Sequence

import pytest
from scheduler_oracle import EOS, VOCAB, KvSimulator, Run, expected_output, memory

from pocket_backend.api import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    SamplingParams,
)
from pocket_backend.core import (
    ContinuousBatchScheduler,
    ExecuteOutput,
    MemoryInfo,
    RequestStatus,
    ScheduledRequest,
    SchedulerConfig,
    StepPlan,
)
from pocket_backend.core.admission import token_limit
from pocket_backend.kv import BlockManager

NO_CACHE = SchedulerConfig(enable_prefix_cache=False)


def start(sizes: MemoryInfo, config: SchedulerConfig | None = None) -> Run:
    return Run(ContinuousBatchScheduler(sizes, config, eos_token_ids=[EOS]), keep_plans=True)


def add(
    run: Run,
    name: str,
    prompt: Sequence[int],
    max_tokens: int | None = 8,
    *,
    n: int = 1,
    seed: int | None = 1,
    priority: int = 0,
    deadline: float | None = None,
    salt: str = "",
    adapter: str = "",
    ignore_eos: bool = True,
    stop: tuple[int, ...] = (),
) -> ScheduledRequest:
    params = SamplingParams(
        max_tokens=max_tokens, n=n, seed=seed, ignore_eos=ignore_eos, stop_token_ids=stop
    )
    request = ScheduledRequest(
        name,
        prompt,
        sampling_params=params,
        priority=priority,
        deadline_seconds=deadline,
        cache_salt=salt,
        adapter=adapter,
    )
    return run.scheduler.add_request(request, run.now)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def assert_as_alone(run: Run, *sequences: ScheduledRequest) -> None:
    limit = token_limit(run.scheduler.memory)
    for sequence in sequences:
        wanted, reason = expected_output(
            sequence.prompt_tokens, sequence.sampling_params, sequence.seed, limit
        )
        assert list(sequence.generated_tokens) == wanted
        assert sequence.finish_reason == reason


def assert_idle(run: Run) -> None:
    run.scheduler.check_integrity()
    stats = run.scheduler.stats()
    assert stats.blocks.in_use == stats.running == stats.waiting == 0
    assert stats.free_slots == run.scheduler.memory.max_slots


def test_s1_prefix_evicted_between_a_failed_admission_and_the_next() -> None:
    run = start(memory(num_blocks=12))
    shared = prompt_of(16)
    add(run, "warm", [*shared, 1], 1)
    run.drain()
    assert run.scheduler.stats().blocks.cached_only == 4
    # Fills memory, so that A, whose prefix is still cached, does not fit.
    large = add(run, "large", prompt_of(30, seed=1), 12)
    run.step()
    a = add(run, "A", [*shared, *prompt_of(14, seed=2)], 4)
    run.step()
    assert a.status is RequestStatus.WAITING
    while large.status is RequestStatus.RUNNING and run.scheduler.stats().blocks.cached_only:
        run.step()
    assert run.scheduler.stats().evicted_blocks > 0
    run.drain()
    assert_as_alone(run, large, a)
    assert_idle(run)


def test_s3_aborted_prefill_leaves_only_whole_written_blocks() -> None:
    run = start(memory(max_batch_tokens=10))
    prompt = prompt_of(30)
    add(run, "aborted", prompt)
    run.step()
    # 10 tokens are written and 10 more in flight when the client goes away.
    run.step(during=lambda _: run.scheduler.cancel("aborted"))
    assert run.scheduler.stats().blocks.cached_only == 10 // 4
    again = add(run, "again", prompt)
    run.drain()
    assert again.cached_tokens == 8
    assert_as_alone(run, again)
    assert_idle(run)


@pytest.mark.parametrize("seed", range(4))
def test_s4_accounts_balance_under_shared_prefixes_aborts_and_preemptions(seed: int) -> None:
    rng = random.Random(seed)
    run = start(memory(num_blocks=24, max_slots=6))
    stems = [prompt_of(20, seed=1), prompt_of(20, seed=2)]
    sequences = []
    for step in range(150):
        if rng.random() < 0.5:
            prompt = rng.choice(stems)[: rng.randint(1, 20)] + prompt_of(rng.randint(0, 5), step)
            sequences.append(add(run, f"r{step}", prompt, rng.randint(1, 30)))
        if sequences and rng.random() < 0.1:
            run.scheduler.cancel(rng.choice(sequences).request_id)
        run.step()
        run.scheduler.check_integrity()
        blocks = run.scheduler.stats().blocks
        assert blocks.free + blocks.in_use + blocks.cached_only == blocks.total
    run.drain()
    assert run.scheduler.stats().preemptions > 0
    assert_idle(run)
    assert_as_alone(run, *(s for s in sequences if s.finish_reason != "cancelled"))


def test_s5_salt_and_adapter_of_one_name_do_not_meet() -> None:
    run = start(memory())
    prompt = prompt_of(20)
    add(run, "adapter", prompt, adapter="X")
    run.drain()
    add(run, "salt", prompt, salt="X")
    run.drain()
    add(run, "base", prompt)
    run.drain()
    assert run.scheduler.stats().prefix_hit_tokens == 0
    add(run, "adapter again", prompt, adapter="X")
    run.drain()
    assert run.scheduler.stats().prefix_hit_tokens == 16


class _SameHash(bytes):
    __slots__ = ()

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return bytes(self) == bytes(other) if isinstance(other, bytes) else NotImplemented


def test_s6_forced_hash_collisions_change_nothing() -> None:
    results = []
    for key in (None, _SameHash):
        run = start(memory(num_blocks=30))
        run.scheduler._life.blocks = BlockManager(30, 4, block_key=key)
        sequences = [add(run, f"r{i}", prompt_of(20, seed=i % 3), 12) for i in range(9)]
        run.drain()
        assert_as_alone(run, *sequences)
        results.append(
            (
                [s.generated_tokens for s in sequences],
                run.scheduler.stats(),
                [s.cached_tokens for s in sequences],
            )
        )
    assert results[0] == results[1]
    assert results[0][1].prefix_hit_tokens > 0


def test_s7_tenants_do_not_share_and_each_still_hits_itself() -> None:
    run = start(memory())
    prompt = prompt_of(20)
    hits = []
    for number, salt in enumerate(["a", "b", "a", "b"]):
        hits.append(add(run, f"r{number}", prompt, salt=salt))
        run.drain()
    assert [s.cached_tokens for s in hits] == [0, 0, 16, 16]


def test_s10_prompt_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    run = start(
        memory(num_blocks=64, block_size=16, max_context=4096, max_batch_tokens=256),
    )
    with pytest.raises(InvalidRequestError, match=r"1500 tokens .* 94 KV blocks of 16 .* 64;"):
        add(run, "large", prompt_of(1500))
    short = add(run, "short", prompt_of(10))
    run.drain()
    assert_as_alone(run, short)


def test_s10_growth_past_the_pool_ends_with_length() -> None:
    run = start(memory(num_blocks=8))
    # Alone it may fill the pool; together they preempt each other, and get as far.
    both = [add(run, f"r{i}", prompt_of(9, seed=i), None) for i in range(2)]
    run.drain()
    assert [s.total_tokens for s in both] == [32, 32]
    assert [s.finish_reason for s in both] == ["length", "length"]
    assert run.scheduler.stats().preemptions > 0
    assert_as_alone(run, *both)
    assert_idle(run)


def test_s11_newcomers_are_not_behind_a_long_prompt() -> None:
    run = start(memory(num_blocks=3000, max_slots=16, max_batch_tokens=64))
    old = add(run, "old", prompt_of(5), None)
    run.step()
    run.step()
    long = add(run, "long", prompt_of(8000, seed=1))
    run.step()
    short = [add(run, f"short{i}", prompt_of(12, seed=i + 2), 4) for i in range(10)]
    steps = 0
    while not all(s.status is RequestStatus.FINISHED for s in short):
        generated = old.num_generated_tokens
        computed = long.num_computed_tokens
        run.step()
        steps += 1
        assert old.num_generated_tokens == generated + 1, "a decode was left out"
        assert long.num_computed_tokens > computed, "the long prompt stands still"
    # 120 prompt tokens at a quarter of the budget (16 a step), and three more decodes.
    assert steps <= 14
    assert long.num_computed_tokens < 1000
    run.scheduler.cancel("old")
    run.drain()
    assert_as_alone(run, long, *short)


def test_prompts_that_fit_in_the_step_are_not_split() -> None:
    run = start(memory(num_blocks=200, max_slots=16, max_batch_tokens=64))
    for i in range(8):
        add(run, f"r{i}", prompt_of(16, seed=i))
    plan = run.step()
    assert plan is not None
    assert [len(r.token_ids) for r in plan.requests] == [16, 16, 16, 16]


def test_a_step_is_full_while_there_is_work_for_it() -> None:
    run = start(memory(num_blocks=400, max_slots=4, max_batch_tokens=64))
    for i in range(4):
        add(run, f"r{i}", prompt_of(200, seed=i))
    for _ in range(12):
        plan = run.step()
        assert plan is not None
        assert plan.num_tokens == 64


def test_s11_two_long_prompts_do_not_shut_out_newcomers_either() -> None:
    run = start(memory(num_blocks=3000, max_slots=16, max_batch_tokens=64))
    for i in range(3):
        add(run, f"long{i}", prompt_of(2000, seed=i))
    run.step()
    short = add(run, "short", prompt_of(12, seed=9), 1)
    for _ in range(6):
        run.step()
    assert short.status is RequestStatus.FINISHED


def test_s12_seeded_output_does_not_depend_on_neighbours_order_or_preemption() -> None:
    def sample(neighbours: list[tuple[str, int | None]], blocks: int) -> tuple[int, ...]:
        run = start(memory(num_blocks=blocks))
        for name, seed in neighbours[:2]:
            add(run, name, prompt_of(9, seed=3), 30, seed=seed)
        target = add(run, "target", prompt_of(9), 30, seed=42)
        for name, seed in neighbours[2:]:
            add(run, name, prompt_of(9, seed=4), 30, seed=seed)
        run.drain()
        return target.generated_tokens

    alone = sample([], 64)
    crowd: list[tuple[str, int | None]] = [("a", None), ("b", 7), ("c", 42), ("d", None)]
    assert sample(crowd[:1], 64) == alone
    assert sample(crowd, 64) == alone
    assert sample(crowd[::-1], 64) == alone
    assert sample(crowd, 16) == alone


def test_s12_seeds_of_choices_and_of_unseeded_requests_are_distinct() -> None:
    run = start(memory())
    first = add(run, "n", prompt_of(9), 8, n=4, seed=5)
    other = add(run, "none", prompt_of(9), 8, seed=None)
    third = add(run, "none2", prompt_of(9), 8, seed=None)
    assert first.group is not None
    seeds = [s.seed for s in first.group.sequences] + [other.seed, third.seed]
    assert seeds[0] == 5
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(("length", "output"), [(31, 1), (30, 2)])
def test_s16_prompts_up_to_the_limit_run(length: int, output: int) -> None:
    run = start(memory(max_context=32))
    sequence = add(run, "r", prompt_of(length), 100)
    run.drain()
    assert sequence.num_generated_tokens == output
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize("length", [32, 33])
def test_s16_prompts_that_leave_no_room_are_refused_with_the_numbers(length: int) -> None:
    run = start(memory(max_context=32))
    with pytest.raises(InvalidRequestError, match=rf"{length} tokens .* context of 32.* most 31"):
        add(run, "r", prompt_of(length))
    assert not run.scheduler.has_work()


def test_s17_no_max_tokens_costs_no_concurrency() -> None:
    concurrency = []
    for max_tokens in (None, 20):
        # Two full contexts of 400 tokens fit; eight short sequences do, too.
        run = start(memory(num_blocks=200, max_context=400))
        for i in range(8):
            add(run, f"r{i}", prompt_of(8, seed=i), max_tokens)
        for _ in range(10):
            run.step()
        concurrency.append(run.scheduler.stats().running)
    assert concurrency == [8, 8]


def test_s21_output_stops_at_the_context_limit() -> None:
    run = start(memory(num_blocks=100, block_size=16, max_context=1024, max_batch_tokens=256))
    sequence = add(run, "r", prompt_of(900), 512)
    run.drain()
    assert (sequence.total_tokens, sequence.finish_reason) == (1024, "length")


# -- shared prefixes that arrive together ------------------------------------------------------


def test_prefix_that_is_being_computed_is_waited_for_not_computed_again() -> None:
    """Workload C, cold: 16 requests at once, 1,024 shared and 32 own prompt tokens each."""
    sizes = memory(num_blocks=300, block_size=16, max_slots=16, max_batch_tokens=512)
    shared = prompt_of(1024)
    computed = {}
    for name, config in (
        ("on", SchedulerConfig()),
        ("no wait", SchedulerConfig(prefix_wait_steps=0)),
        ("off", NO_CACHE),
    ):
        run = start(MemoryInfo(1200, 16, 16, 4096, 512, VOCAB) if name != "on" else sizes, config)
        requests = [add(run, f"r{i}", shared + prompt_of(32, seed=i + 1), 2) for i in range(16)]
        run.drain()
        assert_as_alone(run, *requests)
        computed[name] = run.scheduler.stats().computed_tokens
    assert computed["on"] == 1024 + 16 * 32 + 16
    assert computed["off"] == 16 * (1024 + 32) + 16
    # Without the wait, those that are admitted in one step compute the same blocks.
    assert computed["no wait"] > 2 * computed["on"]


def test_prefix_wait_ends_when_the_writer_is_cancelled() -> None:
    run = start(memory(max_batch_tokens=8))
    prompt = prompt_of(64)
    add(run, "writer", prompt)
    run.step()
    waiting = [add(run, f"r{i}", prompt) for i in range(3)]
    run.step()
    assert run.scheduler.stats().held_back == 3
    run.scheduler.cancel("writer")
    run.step()
    # One of them goes on with the blocks that are there; the others wait for it.
    assert waiting[0].status is RequestStatus.RUNNING
    assert waiting[0].cached_tokens == 16
    assert run.scheduler.stats().held_back == 2
    run.drain()
    assert_as_alone(run, *waiting)


def test_prefix_wait_is_bounded() -> None:
    run = start(memory(num_blocks=200, max_batch_tokens=4), SchedulerConfig(prefix_wait_steps=5))
    prompt = prompt_of(200)
    add(run, "writer", prompt)
    run.step()
    other = add(run, "other", prompt)
    for _ in range(7):
        run.step()
    assert other.status is RequestStatus.RUNNING
    assert other.waited_steps == 5
    run.drain()
    assert_as_alone(run, other)


def test_prefix_wait_is_not_for_the_block_of_the_last_token() -> None:
    run = start(memory(max_batch_tokens=12))
    prompt = prompt_of(16)
    add(run, "writer", prompt)
    other = add(run, "other", prompt)
    run.step()
    assert other.status is RequestStatus.WAITING
    run.step()
    # 12 of 16 tokens are cached, and the last block has to be computed in any case.
    assert (other.status, other.cached_tokens) == (RequestStatus.RUNNING, 12)


def test_prefix_wait_lets_unrelated_requests_pass() -> None:
    run = start(memory(num_blocks=200, max_batch_tokens=8))
    prompt = prompt_of(100)
    add(run, "writer", prompt)
    run.step()
    held = add(run, "held", prompt)
    unrelated = add(run, "unrelated", prompt_of(6, seed=1), 1)
    for _ in range(4):
        run.step()
    assert held.status is RequestStatus.WAITING
    assert unrelated.status is RequestStatus.FINISHED


def test_cached_prompt_computes_at_least_its_last_token() -> None:
    run = start(memory())
    prompt = prompt_of(16)
    for i in range(3):
        sequence = add(run, f"r{i}", prompt, 5)
        run.drain()
        assert sequence.cached_tokens == (0 if i == 0 else 12)
        assert_as_alone(run, sequence)


def test_conversation_hits_prompt_and_answer_of_the_turn_before() -> None:
    run = start(memory())
    first = add(run, "turn1", prompt_of(10), 11)
    run.drain()
    second = add(run, "turn2", [*first.tokens, *prompt_of(6, seed=1)])
    run.drain()
    # 21 tokens; the last was never computed, so five blocks of four are cached.
    assert second.cached_tokens == 20
    assert_as_alone(run, second)


def test_recompute_after_preemption_does_not_inflate_the_hit_rate() -> None:
    run = start(memory(num_blocks=14))
    for i in range(4):
        add(run, f"r{i}", prompt_of(8, seed=i), 30)
    run.drain()
    stats = run.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.recomputed_tokens > 0
    assert stats.prefix_query_tokens == 4 * 8
    assert stats.prefix_hit_tokens == 0


# -- n > 1 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 8, 9, 16])
@pytest.mark.parametrize(
    "config", [SchedulerConfig(), NO_CACHE, SchedulerConfig(block_copies=False)]
)
def test_forks_share_the_prompt(length: int, config: SchedulerConfig) -> None:
    run = start(memory(), config)
    first = add(run, "r", prompt_of(length), 6, n=3)
    run.drain()
    assert first.group is not None
    assert_as_alone(run, *first.group.sequences)
    assert sorted(run.ends) == [("r", 0), ("r", 1), ("r", 2)]
    assert [u.request_done for u in run.ends.values()].count(True) == 1
    assert_idle(run)
    # Own work: the prompt's last token and five of the six output tokens, each; with copies the
    # siblings compute nothing else.
    if config.block_copies:
        assert run.scheduler.stats().computed_tokens == length + 2 + 3 * 5
        assert run.kv.copies == (2 if (length - 1) % 4 else 0)
    else:
        assert run.kv.copies == 0


def test_siblings_run_even_if_the_first_fails_before_the_prompt_is_computed() -> None:
    run = start(memory(max_batch_tokens=6))
    first = add(run, "r", prompt_of(20), 4, n=3)
    run.step()
    run.step(errors=frozenset({"r#0"}))
    run.drain()
    assert first.group is not None
    assert first.finish_reason == "error"
    assert_as_alone(run, *first.group.sequences[1:])


@pytest.mark.parametrize("steps", range(6))
def test_cancel_ends_all_choices_in_every_state(steps: int) -> None:
    run = start(memory(max_batch_tokens=6, max_slots=2))
    first = add(run, "r", prompt_of(10), None, n=3)
    for _ in range(steps):
        run.step()
    assert run.scheduler.cancel("r")
    assert not run.scheduler.cancel("r")
    assert first.group is not None
    assert {s.finish_reason for s in first.group.sequences} == {"cancelled"}
    run.drain()
    assert_idle(run)


# -- many at once ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["priority", "fcfs", "lpm"])
def test_200_mixed_requests_in_a_pool_far_too_small_equal_their_runs_alone(policy: str) -> None:
    rng = random.Random(policy)
    run = start(
        memory(num_blocks=40, max_slots=12, max_batch_tokens=24),
        SchedulerConfig(policy=policy, max_queue=300),
    )
    stems = [prompt_of(40, seed=i) for i in range(4)]
    requests, cancelled = [], 0
    for i in range(200):
        prompt = rng.choice(stems)[: rng.randint(1, 40)] + prompt_of(rng.randint(0, 9), i)
        requests.append(
            add(
                run,
                f"r{i}",
                prompt,
                rng.choice([1, 10, 40, None]),
                n=rng.choice([1, 1, 1, 3]),
                seed=rng.choice([None, i]),
                priority=rng.randint(-2, 2),
                ignore_eos=rng.random() < 0.3,
                stop=rng.choice([(), (3, 4)]),
            )
        )
        if i % 3 == 0:
            run.step()
        if i % 20 == 19:
            cancelled += run.scheduler.cancel(requests[rng.randrange(i)].request_id)
    run.drain()
    stats = run.scheduler.stats()
    assert stats.preemptions > 20
    assert cancelled > 3
    assert stats.prefix_hit_tokens > 0
    assert run.kv.copies > 0
    assert_idle(run)
    for request in requests:
        assert request.group is not None
        for sequence in request.group.sequences:
            if sequence.finish_reason != "cancelled":
                assert_as_alone(run, sequence)


def test_cost_of_a_step_does_not_depend_on_the_context() -> None:
    def calls(context: int) -> int:
        scheduler = ContinuousBatchScheduler(MemoryInfo(4000, 16, 4, 1 << 16, 1 << 16, VOCAB))
        run = Run(scheduler)
        for i in range(4):
            add(run, f"r{i}", prompt_of(context, seed=i), 100)
        plan = scheduler.schedule(0.0)
        total = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal total
            total += event in ("call", "c_call")

        for step in range(33):
            assert plan is not None
            outputs = [
                ExecuteOutput(r.request_id, (step + r.slot_id) % VOCAB) for r in plan.requests
            ]
            sys.setprofile(count if step else None)
            scheduler.update(plan, outputs, 0.0)
            plan = scheduler.schedule(0.0)
            sys.setprofile(None)
        return total

    gc.disable()  # its callbacks would be counted
    try:
        assert calls(96) == calls(9600)
    finally:
        gc.enable()


# -- order and fairness ------------------------------------------------------------------------


def first_starts(run: Run) -> list[str]:
    """Request ids in the order of their first step."""
    order: dict[str, None] = {}
    for plan in run.plans:
        for request in plan.requests:
            order.setdefault(request.request_id)
    return list(order)


def test_priority_then_arrival() -> None:
    run = start(memory(max_slots=1))
    for name, priority in [("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)]:
        add(run, name, prompt_of(3, seed=ord(name)), 2, priority=priority)
    run.drain()
    assert first_starts(run) == ["c", "e", "a", "d", "b"]


def test_fcfs_ignores_priority() -> None:
    run = start(memory(max_slots=1), SchedulerConfig(policy="fcfs"))
    for name, priority in [("a", 0), ("b", 1), ("c", -1)]:
        add(run, name, prompt_of(3, seed=ord(name)), 2, priority=priority)
    run.drain()
    assert first_starts(run) == ["a", "b", "c"]


@pytest.mark.parametrize(("ageing", "served"), [(10.0, True), (None, False)])
def test_low_priority_is_served_under_a_stream_of_higher_ones(
    ageing: float | None, served: bool
) -> None:
    run = start(memory(max_slots=1), SchedulerConfig(priority_ageing_seconds=ageing))
    low = add(run, "low", prompt_of(3), 1, priority=2)
    for i in range(60):
        add(run, f"high{i}", prompt_of(3, seed=i), 1)
        run.now += 1.0
        run.step()
    assert (low.status is RequestStatus.FINISHED) == served


def test_lpm_serves_the_longest_cached_prefix_first_but_not_for_ever() -> None:
    config = SchedulerConfig(policy="lpm", lpm_max_overtakes=3)
    run = start(memory(max_slots=1), config)
    cached = prompt_of(16)
    add(run, "warm", cached, 1)
    run.drain()
    add(run, "cold", prompt_of(16, seed=1), 1)
    for i in range(6):
        add(run, f"hit{i}", [*cached, i], 1)
    run.drain()
    assert first_starts(run) == ["warm", "hit0", "hit1", "hit2", "cold", "hit3", "hit4", "hit5"]


def test_preemption_takes_the_lowest_ranked() -> None:
    run = start(memory(num_blocks=12))
    low = add(run, "low", prompt_of(8, seed=1), 30, priority=1)
    high = add(run, "high", prompt_of(8, seed=2), 30)
    run.drain()
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)
    assert_as_alone(run, low, high)


# -- limits, deadlines, failures ---------------------------------------------------------------


def test_full_queue_refuses_and_says_so() -> None:
    run = start(memory(max_slots=1), SchedulerConfig(max_queue=2))
    for i in range(3):  # one could start at once
        add(run, f"r{i}", prompt_of(3))
    with pytest.raises(OverloadedError, match="max_queue 2"):
        add(run, "more", prompt_of(3))
    run.step()
    assert run.scheduler.stats().waiting == 2
    run.drain()
    add(run, "later", prompt_of(3))


def test_id_in_use_is_refused_until_it_ends() -> None:
    run = start(memory())
    add(run, "r", prompt_of(3))
    with pytest.raises(InvalidRequestError, match="request_id"):
        add(run, "r", prompt_of(3))
    # Cancelled while in flight and sent again at once: the old output is not taken for the new.
    second: list[ScheduledRequest] = []

    def replace(_: StepPlan) -> None:
        run.scheduler.cancel("r")
        second.append(add(run, "r", prompt_of(5, seed=1)))

    run.step(during=replace)
    run.drain()
    assert_as_alone(run, *second)


@pytest.mark.parametrize(
    ("prompt", "stop", "message"),
    [
        ([], (), "at least one token"),
        ([1, VOCAB], (), r"got 50; token ids are 0 to 49"),
        ([1, -1], (), "got -1"),
        ([1], (10**9,), "stop_token_ids: got 1000000000"),
    ],
)
def test_bad_tokens_are_refused(prompt: list[int], stop: tuple[int, ...], message: str) -> None:
    run = start(memory())
    with pytest.raises(InvalidRequestError, match=message):
        add(run, "r", prompt, stop=stop)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 10**400),
        ("deadline_seconds", float("nan")),
        ("deadline_seconds", 0.0),
        ("deadline_seconds", float("inf")),
        ("cache_salt", "x" * 2000),
    ],
)
def test_values_that_would_break_the_queues_are_refused(field: str, value: object) -> None:
    run = start(memory())
    request = ScheduledRequest("r", [1], **{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=f"{field}: got"):
        run.scheduler.add_request(request, 0.0)
    assert not run.scheduler.has_work()


def test_a_request_object_serves_once() -> None:
    run = start(memory())
    sequence = add(run, "r", prompt_of(3))
    run.drain()
    with pytest.raises(EngineError, match="queued before"):
        run.scheduler.add_request(sequence, 0.0)


@pytest.mark.parametrize("prompt", [["a"], [2**31], [1.5], [None]])
def test_tokens_that_are_no_int32_are_refused(prompt: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="integer"):
        ScheduledRequest("r", prompt)


def test_deadline_ends_queued_and_running_requests() -> None:
    run = start(memory(max_slots=1))
    running = add(run, "running", prompt_of(5), None, deadline=1.0)
    add(run, "queued", prompt_of(5, seed=1), 5, deadline=0.5)
    kept = add(run, "kept", prompt_of(5, seed=2), 5)
    for _ in range(5):
        run.step()
    run.now = 0.6
    run.step()
    assert list(run.ends) == [("queued", 0)]
    run.now = 1.1
    run.drain()
    assert running.num_generated_tokens > 0
    for name in ("queued", "running"):
        end = run.ends[(name, 0)]
        assert (end.finish_reason, end.request_done) == ("error", True)
        assert isinstance(end.error, DeadlineExceededError)
    assert_as_alone(run, kept)
    assert_idle(run)


def test_queue_deadline_spares_what_has_started() -> None:
    run = start(memory(max_slots=1), SchedulerConfig(queue_timeout_seconds=0.5))
    started = add(run, "started", prompt_of(5), 20)
    add(run, "queued", prompt_of(5, seed=1), 5)
    run.step()
    run.now = 10.0
    run.drain()
    assert_as_alone(run, started)
    assert isinstance(run.ends[("queued", 0)].error, DeadlineExceededError)
    assert "0.5 s" in str(run.ends[("queued", 0)].error)


def test_deadlines_do_not_keep_finished_requests() -> None:
    run = start(memory(), SchedulerConfig(default_deadline_seconds=1e6))
    for i in range(500):
        add(run, f"r{i}", [1, 2], 1)
        run.step()
    assert len(run.scheduler._deadlines._heap) < 200


def test_failing_step_fails_only_the_culprit() -> None:
    run = start(memory(max_batch_tokens=16))
    good = [add(run, f"good{i}", prompt_of(9, seed=i), 12) for i in range(3)]
    bad = add(run, "bad", prompt_of(9, seed=9), 12)
    for _ in range(4):
        run.step()
    while bad.status is not RequestStatus.FINISHED:
        # The executor raises whenever "bad" is in the step.
        plan = run.scheduler.schedule(run.now)
        assert plan is not None
        for slot in plan.reset_slots:
            run.kv.reset_slot(slot)
        if bad in plan.sequences:
            with pytest.raises(RuntimeError):
                run.kv.execute(plan, fail=True)
            failed = run.scheduler.fail_step(plan, EngineError("illegal instruction"))
            assert [u.request_id for u in failed] in ([], ["bad"])
        else:
            results = run.kv.execute(plan)
            run._deliver(run.scheduler.update(plan, results, run.now))
        run.scheduler.check_integrity()
    assert bad.finish_reason == "error"
    run.drain()
    assert_as_alone(run, *good)
    assert_idle(run)


@pytest.mark.parametrize("fail_at", range(8))
def test_forks_survive_a_failed_step(fail_at: int) -> None:
    run = start(memory(max_batch_tokens=6))
    first = add(run, "r", prompt_of(10), 6, n=3)
    other = add(run, "other", prompt_of(7, seed=1), 9)
    for step in range(10):
        run.step(fail=step == fail_at)
    run.drain()
    assert first.group is not None
    alive = [s for s in (other, *first.group.sequences) if s.finish_reason != "error"]
    assert len(alive) >= 3
    assert_as_alone(run, *alive)
    assert_idle(run)


def test_fork_whose_step_failed_does_not_repeat_the_copy_without_its_source() -> None:
    run = start(memory())
    first = add(run, "r", prompt_of(10), 6, n=2)
    run.step()
    plan = run.step(fail=True)
    assert plan is not None
    assert plan.requests[1].block_copies
    run.scheduler.finish("r", "stop", 0)
    other = add(run, "other", prompt_of(20, seed=1))
    run.drain()
    assert first.group is not None
    assert_as_alone(run, first.group.sequences[1], other)


def test_outputs_that_do_not_belong_to_the_plan_are_refused_unchanged() -> None:
    run = start(memory())
    a = add(run, "a", prompt_of(3))
    add(run, "b", prompt_of(3, seed=1))
    plan = run.scheduler.schedule(0.0)
    assert plan is not None
    results = run.kv.execute(plan)
    for wrong in (results[:1], results[::-1], []):
        with pytest.raises(EngineError):
            run.scheduler.update(plan, wrong, 0.0)
    with pytest.raises(EngineError):
        run.scheduler.schedule(0.0)
    assert a.num_generated_tokens == 0
    run.scheduler.update(plan, results, 0.0)
    with pytest.raises(EngineError):
        run.scheduler.update(plan, results, 0.0)


def test_finish_from_outside_frees_the_slot_in_the_same_step() -> None:
    run = start(memory(max_slots=1))
    first = add(run, "first", prompt_of(5), None)
    second = add(run, "second", prompt_of(5, seed=1), 1)
    run.step()
    assert run.scheduler.finish("first", "stop")
    assert first.finish_reason == "stop"
    plan = run.step()
    assert plan is not None
    assert plan.reset_slots == (0,)
    assert second.status is RequestStatus.FINISHED


def test_stop_tokens_and_min_tokens() -> None:
    run = start(memory())
    prompt = prompt_of(6)
    free, _ = expected_output(prompt, SamplingParams(max_tokens=20, ignore_eos=True), 1, 10**6)
    stop = free[4]
    sequence = add(run, "r", prompt, 20, stop=(stop,))
    run.drain()
    end = run.ends[("r", 0)]
    at = free.index(stop)
    assert list(sequence.generated_tokens) == free[: at + 1]
    assert (end.finish_reason, end.stop_reason) == ("stop", stop)


def test_sequence_begun_elsewhere_goes_on_as_if_here() -> None:
    run = start(memory())
    prompt = prompt_of(9)
    params = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)
    wanted, _ = expected_output(prompt, params, 7, 10**6)
    moved = ScheduledRequest("moved", prompt, wanted[:5], sampling_params=params)
    run.scheduler.add_request(moved, 0.0)
    run.drain()
    assert list(moved.generated_tokens) == wanted
    assert run.outputs[("moved", 0)] == wanted[5:]


def test_one_block_per_slot_serves_executors_without_paging() -> None:
    """A model whose state cannot be paged: one block is one slot's whole context."""
    run = start(MemoryInfo(3, 64, 3, 64, 16, VOCAB))
    sequences = [add(run, f"r{i}", prompt_of(20, seed=i), 30) for i in range(7)]
    run.drain()
    assert_as_alone(run, *sequences)
    assert run.scheduler.stats().preemptions == 0


def test_older_names_work_on_top() -> None:
    scheduler = ContinuousBatchScheduler(
        max_batch_size=2, max_total_tokens=256, enable_prefix_cache=True
    )
    kv: dict[str, list[int]] = {}
    for i in range(3):
        scheduler.add_request(
            ScheduledRequest(f"r{i}", [1 + i, 2, 3], sampling_params=SamplingParams(max_tokens=3))
        )
    prefill, decode = scheduler.schedule_step()
    assert [r.request_id for r in prefill] == ["r0", "r1"]
    assert not decode
    steps = 0
    while prefill or decode:
        outputs = []
        for request in (*decode, *prefill):
            kv.setdefault(request.request_id, []).extend(request.token_ids)
            outputs.append(ExecuteOutput(request.request_id, 9 if request.samples else None))
        if steps == 1:
            scheduler.complete_request("r0")
            scheduler.complete_request("r0")
        prefill, decode = scheduler.schedule_step(outputs)
        steps += 1
    assert kv == {"r0": [1, 2, 3, 9], "r1": [2, 2, 3, 9, 9], "r2": [3, 2, 3, 9, 9]}
    assert not scheduler.has_work()


def test_oracle_itself_notices_a_wrong_block() -> None:
    """The simulator must be able to fail: hand it a plan with a table of somebody else."""
    run = start(memory())
    add(run, "a", prompt_of(6), 4)
    add(run, "b", prompt_of(6, seed=1), 4)
    run.step()
    kv: KvSimulator = run.kv
    kv.tables[0], kv.tables[1] = kv.tables[1], kv.tables[0]
    act: Callable[[], object] = run.step
    with pytest.raises(AssertionError):
        act()
