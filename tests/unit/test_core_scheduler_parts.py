"""Configuration, queues and request state; the scheduler itself is under tests/property."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pocket_backend.api import ConfigurationError, GenerationRequest, SamplingParams
from pocket_backend.core import (
    ContinuousBatchScheduler,
    ExecuteOutput,
    MemoryInfo,
    RequestStatus,
    ScheduledRequest,
    SchedulerConfig,
)
from pocket_backend.core.lifecycle import mix_seed
from pocket_backend.core.queue import LongestPrefixQueue, OrderedQueue, WaitingQueue
from pocket_backend.executors.fake import FakeExecutor, FakeOptions


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("policy", "random", "must be one of priority, fcfs, lpm"),
        ("eviction", "newest", "must be one of lru, lfu, fifo"),
        ("max_queue", -1, "integer of at least 0"),
        ("max_running", 0, "integer of at least 1"),
        ("max_batch_tokens", True, "integer of at least 1"),
        ("reserved_share", 1.0, "from 0 to 0.9"),
        ("watermark", "much", "from 0 to 0.9"),
        ("queue_timeout_seconds", 0, "above 0, or None"),
        ("default_deadline_seconds", float("nan"), "above 0"),
        ("priority_ageing_seconds", float("inf"), "finite"),
    ],
)
def test_config_names_field_value_and_remedy(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{field}: got .*{message}"):
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulerConfig().policy = "fcfs"  # type: ignore[misc]


def test_scheduler_needs_sizes() -> None:
    with pytest.raises(ConfigurationError, match="MemoryInfo"):
        ContinuousBatchScheduler()


def request(name: str, order: int) -> ScheduledRequest:
    made = ScheduledRequest(name, [1])
    made.order = (0.0, order, 0)
    return made


@pytest.mark.parametrize("kind", ["ordered", "lpm"])
def test_queues_against_a_sorted_list(kind: str) -> None:
    rng = random.Random(kind)
    queue: WaitingQueue = (
        OrderedQueue() if kind == "ordered" else LongestPrefixQueue(lambda _: 0, 4, 4)
    )
    model: list[ScheduledRequest] = []
    for number in range(3000):
        action = rng.random()
        if action < 0.5:
            made = request(f"r{number}", rng.randrange(10**9))
            queue.push(made)
            model.append(made)
        elif action < 0.75 and model:
            gone = model.pop(rng.randrange(len(model)))
            gone.status = RequestStatus.FINISHED
            queue.forget(gone)
        else:
            head = queue.peek()
            if kind == "ordered":
                assert head is min(model, key=lambda r: r.order, default=None)
            if head is None:
                assert not model
                continue
            queue.pop(head)
            model.remove(head)
        assert len(queue) == len(model)
        if number % 100 == 0:
            assert set(queue) == set(model)


def test_cancelled_requests_do_not_stay_in_the_heap() -> None:
    queue = OrderedQueue()
    queue.push(request("kept", 0))
    for number in range(1000):
        made = request(f"r{number}", number + 1)
        queue.push(made)
        made.status = RequestStatus.FINISHED
        queue.forget(made)
    assert len(queue._heap) < 200


def test_request_shows_its_tokens_and_phase() -> None:
    made = ScheduledRequest("r", [1, 2, 3], [4])
    assert (made.prompt_tokens, made.generated_tokens) == ((1, 2, 3), (4,))
    assert (made.total_tokens, made.num_generated_tokens) == (4, 1)
    assert made.is_prefill_phase
    made.num_computed_tokens = 3
    assert not made.is_prefill_phase
    assert "computed=3" in repr(made)


def test_generation_request_is_taken_over() -> None:
    params = SamplingParams(max_tokens=3)
    made = ScheduledRequest.from_generation(
        GenerationRequest("r", (1, 2), params, priority=4, deadline_seconds=5.0, cache_salt="s")
    )
    assert (made.request_id, made.prompt_tokens, made.sampling_params) == ("r", (1, 2), params)
    assert (made.priority, made.deadline_seconds, made.namespace.salt) == (4, 5.0, "s")


def test_seeds_are_64_bits_and_spread() -> None:
    seeds = {mix_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(1000)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("seed", [-1, 2**64 - 1])
def test_negative_seeds_are_the_same_64_bits(seed: int) -> None:
    scheduler = ContinuousBatchScheduler(MemoryInfo(4, 4, 1, 16, 8, 10))
    scheduler.add_request(GenerationRequest("r", (1,), SamplingParams(seed=seed)), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.requests[0].seed == 2**64 - 1


def test_execute_requests_are_whole_first_and_deltas_afterwards() -> None:
    scheduler = ContinuousBatchScheduler(MemoryInfo(16, 4, 2, 64, 6, 10))
    params = SamplingParams(max_tokens=6)
    scheduler.add_request(GenerationRequest("r", (1, 2, 3, 4, 5, 6, 7), params), 0.0)
    seen = []
    while (plan := scheduler.schedule(0.0)) is not None and plan.requests:
        (asked,) = plan.requests
        seen.append(
            (
                asked.is_prefill,
                asked.is_new,
                asked.start_position,
                asked.token_ids,
                asked.block_ids,
                asked.samples,
                asked.output_index,
            )
        )
        scheduler.update(plan, [ExecuteOutput("r", 9 if asked.samples else None)], 0.0)
    assert seen == [
        (True, True, 0, (1, 2, 3, 4, 5, 6), (0, 1), False, 0),
        (True, False, 6, (7,), (), True, 0),
        (False, False, 7, (9,), (), True, 1),
        (False, False, 8, (9,), (2,), True, 2),
        (False, False, 9, (9,), (), True, 3),
        (False, False, 10, (9,), (), True, 4),
        (False, False, 11, (9,), (), True, 5),
    ]


def test_fake_executor_gives_the_same_outputs_under_memory_pressure() -> None:
    """The project's own fake reads KV through the block tables, too."""

    def outputs(num_blocks: int, cache: bool) -> list[tuple[int, ...]]:
        executor = FakeExecutor(
            FakeOptions(num_blocks=num_blocks, max_slots=6, max_batch_tokens=40)
        )
        scheduler = ContinuousBatchScheduler(
            executor.get_memory_info(), SchedulerConfig(enable_prefix_cache=cache)
        )
        requests = [
            ScheduledRequest(
                f"r{i}",
                [*range(1, 60), i],
                sampling_params=SamplingParams(max_tokens=60, seed=i, temperature=1.0, n=1 + i % 2),
            )
            for i in range(8)
        ]
        for made in requests:
            scheduler.add_request(made, 0.0)
        while (plan := scheduler.schedule(0.0)) is not None:
            for slot in plan.reset_slots:
                executor.reset_slot(slot)
            if plan.requests:
                scheduler.update(plan, executor.execute_model(plan.requests), 0.0)
        scheduler.check_integrity()
        assert scheduler.stats().blocks.in_use == 0
        groups = [made.group for made in requests]
        return [s.generated_tokens for group in groups if group for s in group.sequences]

    relaxed = outputs(200, cache=False)
    assert outputs(200, cache=True) == relaxed
    assert outputs(14, cache=True) == relaxed
    assert outputs(14, cache=False) == relaxed
