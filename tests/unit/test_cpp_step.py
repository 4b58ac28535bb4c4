"""StepArrays: what a step is given does not depend on the steps before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pocket_backend.api import SamplingParams
from pocket_backend.core.step import ExecuteRequest
from pocket_backend.executors.cpp_step import StepArrays

SLOTS, TOKENS, CONTEXT = 4, 32, 64
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.5, top_k=3),
    SamplingParams(temperature=0.5, top_p=1e-35, min_p=0.25, logprobs=2),
    SamplingParams(temperature=0.0),
]


@st.composite
def requests(draw: st.DrawFn) -> list[ExecuteRequest]:
    """Often decodes of the same slots, seeds and parameters, so that the short way is taken."""
    found = []
    for slot in draw(st.sampled_from([(0, 1, 2), (0, 1, 2), (2, 1, 0), (0, 1), (3,)])):
        length = draw(st.sampled_from([1, 1, 1, 1, 5]))
        start = draw(st.integers(0, CONTEXT - length))
        found.append(
            ExecuteRequest(
                request_id=str(slot),
                token_ids=tuple(
                    draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
                ),
                slot_id=slot,
                is_prefill=length > 1,
                sampling_params=PARAMS[draw(st.sampled_from([slot, slot, slot, 0]))],
                start_position=start,
                samples=draw(st.sampled_from([True, True, True, True, False])),
                output_index=draw(st.integers(0, 9)),
                seed=draw(st.sampled_from([slot, slot, slot, -1, 2**63])),
            )
        )
    return found


def successors(step: list[ExecuteRequest]) -> list[ExecuteRequest]:
    """Each sequence's next token."""
    return [
        replace(
            request,
            token_ids=((request.token_ids[-1] * 7 + 1) % 100,),
            start_position=request.start_position + len(request.token_ids),
            output_index=request.output_index + 1,
            is_prefill=False,
            samples=True,
        )
        for request in step
    ]


def filled(arrays: StepArrays, step: list[ExecuteRequest]) -> dict[str, Any]:
    """As the executor does it."""
    arguments = arrays.again(step)
    if arguments is None:
        arguments = arrays.fill(step, [request for request in step if request.samples])
    return {name: np.array(value) for name, value in arguments.items()}


@given(st.lists(st.one_of(requests(), st.just([])), min_size=2, max_size=12), st.data())
def test_a_step_is_filled_as_by_a_new_object(
    steps: list[list[ExecuteRequest]], data: st.DataObject
) -> None:
    kept = StepArrays(SLOTS, TOKENS, CONTEXT)
    last: list[ExecuteRequest] = []
    for drawn in steps:
        step = drawn or successors(last)
        if not step or any(request.start_position >= CONTEXT for request in step):
            continue
        got = filled(kept, step)
        expected = filled(StepArrays(SLOTS, TOKENS, CONTEXT), step)
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            assert array.dtype == got[name].dtype, name
            np.testing.assert_array_equal(got[name], array, err_msg=name)
        last = step
        if data.draw(st.integers(0, 3)):
            kept.ran()


def test_only_the_same_sequences_one_token_further_are_again() -> None:
    """What else changes is filled anew: so the executor checks it."""
    first = [
        ExecuteRequest(
            str(slot), (slot,), slot, False, PARAMS[slot], start_position=9, output_index=3
        )
        for slot in (0, 1)
    ]
    after = successors(first)

    def taken(step: list[ExecuteRequest], *, ran: bool = True, reset: bool = False) -> bool:
        arrays = StepArrays(SLOTS, TOKENS, CONTEXT)
        filled(arrays, first)
        if ran:
            arrays.ran()
        if reset:
            arrays.forget()
        return arrays.again(step) is not None

    assert taken(after)
    assert taken([after[0], replace(after[1], block_ids=(7,))])
    assert not taken(after, ran=False)
    assert not taken(after, reset=True)
    assert not taken(first)
    assert not taken(after[::-1])
    assert not taken(after[:1])
    assert not taken([*after, replace(after[0], slot_id=2)])
    for change in (
        {"is_new": True},
        {"block_copies": ((1, 2),)},
        {"request_id": "other"},
        {"seed": 5},
        {"samples": False},
        {"token_ids": (1, 2)},
        {"sampling_params": PARAMS[2]},
        {"start_position": 11},
    ):
        assert not taken([after[0], replace(after[1], **change)]), change
    edge = [replace(request, start_position=CONTEXT - 1) for request in first]
    arrays = StepArrays(SLOTS, TOKENS, CONTEXT)
    filled(arrays, edge)
    arrays.ran()
    assert arrays.again(successors(edge)) is None


def test_the_arrays_are_those_of_the_requests() -> None:
    arrays = StepArrays(SLOTS, TOKENS, CONTEXT)

    def decode(slot: int, token: int, position: int, index: int) -> ExecuteRequest:
        return ExecuteRequest(
            str(slot),
            (token,),
            slot,
            False,
            PARAMS[slot],
            start_position=position,
            output_index=index,
            seed=-slot,
        )

    for step in range(3):
        batch = [decode(2, 7 + step, 20 + step, step), decode(1, 40 + step, 3 + step, 5 + step)]
        got = {name: value.tolist() for name, value in filled(arrays, batch).items()}
        arrays.ran()
        assert got["token_ids"] == [7 + step, 40 + step]
        assert got["positions"] == [20 + step, 3 + step]
        assert got["sequence_offsets"] == [0, 1, 2]
        assert got["table_rows"] == [2, 1]
        assert got["logits_rows"] == [0, 1]
        assert got["token_index"] == [step, 5 + step]
        assert got["seed"] == [2**64 - 2, 2**64 - 1]
        assert got["top_logprobs"] == [2, -1]
        assert got["temperature"] == [0.5, 0.5]
