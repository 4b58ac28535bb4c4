"""Prefixes that are shared: waited for, hit, and counted."""

from __future__ import annotations

from scheduler_oracle import VOCAB, memory
from scheduler_runs import add, assert_as_alone, prompt_of, start

from pocket_backend.core import MemoryInfo, RequestStatus, SchedulerConfig

NO_CACHE = SchedulerConfig(enable_prefix_cache=False)


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
