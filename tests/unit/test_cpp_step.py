"""StepArrays: what a step is given does not depend on the steps before it."""

from __future__ import annotations

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


@given(st.lists(requests(), min_size=2, max_size=8))
def test_a_step_is_filled_as_by_a_new_object(steps: list[list[ExecuteRequest]]) -> None:
    kept = StepArrays(SLOTS, TOKENS, CONTEXT)
    for step in steps:
        sampled = [request for request in step if request.samples]
        got = kept.fill(step, sampled)
        expected = StepArrays(SLOTS, TOKENS, CONTEXT).fill(step, sampled)
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            assert array.dtype == got[name].dtype, name
            np.testing.assert_array_equal(got[name], array, err_msg=name)


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
        got = {name: array.tolist() for name, array in arrays.fill(batch, batch).items()}
        assert got["token_ids"] == [7 + step, 40 + step]
        assert got["positions"] == [20 + step, 3 + step]
        assert got["sequence_offsets"] == [0, 1, 2]
        assert got["table_rows"] == [2, 1]
        assert got["logits_rows"] == [0, 1]
        assert got["token_index"] == [step, 5 + step]
        assert got["seed"] == [2**64 - 2, 2**64 - 1]
        assert got["top_logprobs"] == [2, -1]
        assert got["temperature"] == [0.5, 0.5]
