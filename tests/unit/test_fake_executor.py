"""The fake executor is deterministic, batch-invariant, and notices wrong tables and slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pocket_backend.api import (
    BackendUnavailableError,
    ConfigurationError,
    EngineError,
    SamplingParams,
)
from pocket_backend.core.step import ExecuteRequest
from pocket_backend.executors.fake import FakeExecutor, FakeOptions

SMALL = FakeOptions(num_blocks=16, block_size=4, max_slots=4, max_context=64, max_batch_tokens=32)


def chunk(
    name: str,
    tokens: tuple[int, ...],
    slot: int = 0,
    blocks: tuple[int, ...] = (),
    start: int = 0,
    *,
    new: bool = True,
    samples: bool = True,
    copies: tuple[tuple[int, int], ...] = (),
    params: SamplingParams | None = None,
    seed: int = 0,
    output_index: int = 0,
) -> ExecuteRequest:
    return ExecuteRequest(
        request_id=name,
        token_ids=tokens,
        slot_id=slot,
        is_prefill=len(tokens) > 1,
        sampling_params=params or SamplingParams(),
        start_position=start,
        is_new=new,
        block_ids=blocks,
        samples=samples,
        block_copies=copies,
        seed=seed,
        output_index=output_index,
    )


def next_token(executor: FakeExecutor, *requests: ExecuteRequest) -> int | None:
    return executor.execute_model(requests)[-1].token_id


PROMPT = (5, 6, 7, 8, 9, 10)


def test_chunks_and_whole_prompt_give_the_same_token() -> None:
    whole = next_token(FakeExecutor(SMALL), chunk("a", PROMPT, blocks=(0, 1)))
    executor = FakeExecutor(SMALL)
    first = chunk("a", PROMPT[:3], 2, (7,), samples=False)
    assert next_token(executor, first) is None
    second = chunk("a", PROMPT[3:], 2, (3,), 3, new=False)
    assert next_token(executor, second) == whole


def test_neighbours_do_not_matter() -> None:
    alone = next_token(FakeExecutor(SMALL), chunk("a", PROMPT, blocks=(0, 1)))
    other = chunk("b", (1, 2, 3), 1, (4,))
    assert next_token(FakeExecutor(SMALL), other, chunk("a", PROMPT, blocks=(0, 1))) == alone


def test_every_token_of_the_sequence_matters() -> None:
    seen = set()
    for at in range(len(PROMPT)):
        changed = (*PROMPT[:at], PROMPT[at] + 50, *PROMPT[at + 1 :])
        seen.add(next_token(FakeExecutor(SMALL), chunk("a", changed, blocks=(0, 1))))
    assert len(seen) > 3


def test_shared_and_copied_blocks_give_the_same_token() -> None:
    executor = FakeExecutor(SMALL)
    whole = next_token(executor, chunk("a", PROMPT, 0, (0, 1)))
    shared = chunk("b", PROMPT[4:], 1, (0, 2), 4)
    assert next_token(executor, shared) == whole
    copied = chunk("c", PROMPT[5:], 2, (0, 3), 5, copies=((1, 3),))
    assert next_token(executor, copied) == whole


def test_a_wrong_table_is_noticed() -> None:
    executor = FakeExecutor(SMALL)
    next_token(executor, chunk("a", PROMPT, 0, (0, 1)))
    [output] = executor.execute_model([chunk("b", (3,), 1, (5, 1), 6)])
    assert output.finish_reason == "error"
    assert output.error is not None
    assert "position 0" in output.error


def test_a_wrong_prefix_changes_the_token() -> None:
    executor = FakeExecutor(SMALL)
    right = next_token(executor, chunk("a", PROMPT, 0, (0, 1)))
    other = tuple(token + 1 for token in PROMPT[:4])
    next_token(executor, chunk("b", other, 1, (2,)))
    assert next_token(executor, chunk("c", PROMPT[4:], 2, (2, 3), 4)) != right


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (chunk("a", PROMPT, 0, (0,)), "in 1 blocks"),
        (chunk("a", PROMPT, 9, (0, 1)), "slots"),
        (chunk("a", (1,), 0, (), new=False), "does not hold"),
        (chunk("a", (1,) * 33, 0, tuple(range(9))), "33 tokens"),
        (chunk("a", (1,) * 5, 0, (*range(16), 0), 60), "beyond context"),
    ],
)
def test_contract_breaches_fail_the_step(bad: ExecuteRequest, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        FakeExecutor(SMALL).execute_model([bad])


def test_reset_slot_forgets_the_table() -> None:
    executor = FakeExecutor(SMALL)
    next_token(executor, chunk("a", PROMPT, 0, (0, 1)))
    assert executor.occupied_slots == {0}
    executor.reset_slot(0)
    executor.reset_slot(0)
    assert not executor.occupied_slots
    with pytest.raises(EngineError, match="does not hold"):
        next_token(executor, chunk("a", (1,), 0, (), 6, new=False))


def test_sampling_depends_on_seed_and_output_index_only_when_sampled() -> None:
    def token(temperature: float, seed: int, index: int) -> int | None:
        params = SamplingParams(temperature=temperature)
        asked = chunk("a", PROMPT, 0, (0, 1), params=params, seed=seed, output_index=index)
        return next_token(FakeExecutor(SMALL), asked)

    assert len({token(0.0, seed, index) for seed in range(4) for index in range(4)}) == 1
    assert token(0.8, 1, 0) == token(0.8, 1, 0)
    assert len({token(0.8, seed, 0) for seed in range(16)}) > 8
    assert len({token(0.8, 1, index) for index in range(16)}) > 8


def test_end_of_sequence_probability_and_min_tokens() -> None:
    options = FakeOptions(eos_probability=1.0)
    asked = chunk("a", PROMPT, 0, (0, 1))
    assert next_token(FakeExecutor(options), asked) == options.eos_token_id
    held = chunk("a", PROMPT, 0, (0, 1), params=SamplingParams(min_tokens=1))
    assert next_token(FakeExecutor(options), held) != options.eos_token_id


def test_logprobs_when_asked() -> None:
    asked = chunk("a", PROMPT, 0, (0, 1), params=SamplingParams(logprobs=2))
    [output] = FakeExecutor(SMALL).execute_model([asked])
    assert output.logprobs is not None
    assert output.logprobs.top is not None
    assert output.token_id in output.logprobs.top
    assert len(output.logprobs.top) == 2


def test_faults() -> None:
    executor = FakeExecutor(SMALL)
    executor.faults.failing_requests.add("a")
    executor.faults.nan_requests.add("b")
    outputs = executor.execute_model(
        [chunk("a", (1,), 0, (0,)), chunk("b", (1,), 1, (1,)), chunk("c", (1,), 2, (2,))]
    )
    assert [output.finish_reason for output in outputs] == ["error", "error", None]
    executor.faults.failing_steps = 1
    with pytest.raises(EngineError, match="told to fail"):
        executor.execute_model([chunk("d", (1,), 3, (3,))])
    executor.execute_model([chunk("d", (1,), 3, (3,))])
    executor.faults.dead = True
    with pytest.raises(BackendUnavailableError):
        executor.execute_model([chunk("d", (1,), 3, (3,))])


def test_a_failed_step_leaves_nothing_to_rely_on() -> None:
    executor = FakeExecutor(SMALL)
    executor.faults.failing_steps = 1
    with pytest.raises(EngineError):
        executor.execute_model([chunk("a", PROMPT, 0, (0, 1))])
    [output] = executor.execute_model([chunk("a", (1,), 0, (0, 1), 6)])
    assert output.finish_reason == "error"


RECURRENT = replace(SMALL, recurrent=True, max_state_snapshots=2)


def test_a_recurrent_state_goes_on_is_saved_and_loaded() -> None:
    prompt = tuple(range(8))
    whole = next_token(FakeExecutor(RECURRENT), chunk("a", prompt, blocks=(0, 1)))
    assert whole != next_token(FakeExecutor(SMALL), chunk("a", prompt, blocks=(0, 1)))
    fake = FakeExecutor(RECURRENT)
    assert fake.supports_feature("recurrent_state")
    assert fake.get_memory_info().num_state_snapshots == 2
    first = replace(chunk("a", prompt[:4], blocks=(0, 1), samples=False), state_target=1)
    assert next_token(fake, first) is None
    assert next_token(fake, chunk("a", prompt[4:], start=4, new=False)) == whole
    again = chunk("b", prompt[4:], slot=1, blocks=(0, 2), start=4)
    assert next_token(fake, replace(again, state_source=1)) == whole
    # In one step all sources are read before any target is written.
    other = replace(chunk("c", (9, 9), slot=2, blocks=(3,)), state_target=1)
    assert fake.execute_model([other, replace(again, state_source=1)])[1].token_id == whole
    # Now it holds another prefix's state.
    assert next_token(fake, replace(again, state_source=1)) != whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_source": 0}, "lost"),
        ({"state_source": 2}, "snapshot 2 is out of range"),
        ({"state_target": -1}, "snapshot -1 is out of range"),
        ({}, "starts at 4 without a state"),
    ],
)
def test_breaches_of_the_state_contract(changes: dict[str, int], message: str) -> None:
    fake = FakeExecutor(RECURRENT)
    with pytest.raises(EngineError, match=message):
        fake.execute_model([replace(chunk("a", (1,), blocks=(0, 1), start=4), **changes)])


def test_a_failed_step_loses_its_states() -> None:
    fake = FakeExecutor(RECURRENT)
    fake.faults.failing_steps = 1
    request = replace(chunk("a", (1, 2, 3, 4), blocks=(0, 1)), state_target=0)
    with pytest.raises(EngineError, match="told to fail"):
        fake.execute_model([request])
    with pytest.raises(EngineError, match="lost"):
        fake.execute_model([replace(chunk("b", (5,), 1, (0, 1), 4), state_source=0)])
    with pytest.raises(EngineError, match="lost"):
        fake.execute_model([chunk("a", (5,), start=4, new=False)])


def test_options_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="num_blocks"):
        FakeOptions(num_blocks=0)
    with pytest.raises(ConfigurationError, match="eos_token_id"):
        FakeOptions(vocab_size=8, eos_token_id=8)
    with pytest.raises(ConfigurationError, match="eos_probability"):
        FakeOptions(eos_probability=1.5)
    with pytest.raises(ConfigurationError, match="no_such"):
        FakeOptions.from_mapping({"no_such": 1})
    assert FakeOptions.from_mapping({"vocab_size": 300}).vocab_size == 300
