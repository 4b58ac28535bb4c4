"""Public bug reports of systems like ours (S..), one test each, on the simulated executor.

Which test belongs to which report: docs/scheduling.md.
"""

from __future__ import annotations

import random

import pytest
from scheduler_oracle import memory
from scheduler_runs import add, assert_as_alone, assert_idle, prompt_of, start

from pocket_backend.api import InvalidRequestError
from pocket_backend.core import RequestStatus
from pocket_backend.kv import BlockManager


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
