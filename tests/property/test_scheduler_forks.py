"""n > 1: choices that share a prompt."""

from __future__ import annotations

import pytest
from scheduler_oracle import memory
from scheduler_runs import add, assert_as_alone, assert_idle, prompt_of, start

from pocket_backend.core import SchedulerConfig

NO_CACHE = SchedulerConfig(enable_prefix_cache=False)


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
