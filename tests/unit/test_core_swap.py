"""The contract for moving KV blocks out of the pool and back, on the fake executor.

The fake reads every position back through the block table, so KV that is lost, misplaced or mixed
up changes its next token or fails the request.
"""

from __future__ import annotations

import pytest

from pocket_backend.api import ConfigurationError, EngineError, SamplingParams
from pocket_backend.core import BlockSwaps, ExecuteOutput, ExecuteRequest
from pocket_backend.executors.fake import FakeExecutor, FakeOptions

PROMPT = (11, 12, 13, 14, 15, 16)


def executor(places: int = 4) -> FakeExecutor:
    return FakeExecutor(
        FakeOptions(num_blocks=4, block_size=4, max_slots=2, max_context=16, num_swap_slots=places)
    )


def step(
    on: FakeExecutor, tokens: tuple[int, ...], blocks: tuple[int, ...], start: int = 0
) -> ExecuteOutput:
    request = ExecuteRequest(
        "r", tokens, 0, len(tokens) > 1, SamplingParams(temperature=0.0),
        start_position=start, is_new=True, block_ids=blocks, output_index=int(start > 0),
    )  # fmt: skip
    (output,) = on.execute_model([request])
    return output


def continued(on: FakeExecutor, token: int, blocks: tuple[int, ...]) -> ExecuteOutput:
    return step(on, (token,), blocks, start=len(PROMPT))


def test_a_swapped_sequence_continues_in_other_blocks_as_if_nothing_had_happened() -> None:
    plain = executor()
    first = step(plain, PROMPT, (0, 1)).token_id
    assert first is not None
    expected = continued(plain, first, (0, 1)).token_id

    subject = executor()
    assert step(subject, PROMPT, (0, 1)).token_id == first
    subject.swap_blocks(BlockSwaps(out=((0, 3), (1, 0))))
    step(subject, tuple(range(21, 29)), (0, 1))  # somebody else's tokens in its blocks
    lost = continued(subject, first, (0, 1)).token_id
    subject.swap_blocks(BlockSwaps(back=((3, 2), (0, 3))))
    assert continued(subject, first, (2, 3)).token_id == expected != lost


def test_blocks_leave_before_others_come_back() -> None:
    subject = executor()
    one = step(subject, PROMPT[:4], (0,)).token_id
    subject.swap_blocks(BlockSwaps(out=((0, 0),)))
    two = step(subject, (31, 32, 33, 34), (0,)).token_id
    assert one is not None
    assert two is not None
    # Block 0 holds the second; one call exchanges it for the first.
    subject.swap_blocks(BlockSwaps(out=((0, 1),), back=((0, 0),)))
    fresh = executor()
    step(fresh, PROMPT[:4], (0,))
    expected = step(fresh, (one,), (0, 1), start=4).token_id
    assert step(subject, (one,), (0, 1), start=4).token_id == expected
    subject.swap_blocks(BlockSwaps(back=((1, 2),)))
    step(fresh, (31, 32, 33, 34), (2,))
    expected = step(fresh, (two,), (2, 3), start=4).token_id
    assert step(subject, (two,), (2, 3), start=4).token_id == expected


def test_a_place_that_was_never_written_is_noticed() -> None:
    subject = executor()
    first = step(subject, PROMPT, (0, 1)).token_id
    assert first is not None
    subject.swap_blocks(BlockSwaps(back=((2, 0),)))
    assert continued(subject, first, (0, 1)).finish_reason == "error"


@pytest.mark.parametrize(
    "swaps", [BlockSwaps(out=((4, 0),)), BlockSwaps(out=((0, 4),)), BlockSwaps(back=((-1, 0),))]
)
def test_ids_out_of_range_are_refused(swaps: BlockSwaps) -> None:
    with pytest.raises(EngineError, match="out of range"):
        executor().swap_blocks(swaps)


def test_the_feature_is_there_only_with_places() -> None:
    assert executor().supports_feature("swap")
    assert not FakeExecutor().supports_feature("swap")
    with pytest.raises(ConfigurationError, match="num_swap_slots"):
        FakeOptions(num_swap_slots=-1)
