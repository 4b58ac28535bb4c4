"""From a scheduled sequence to the executor's request."""

from __future__ import annotations

from collections.abc import Callable

from pocket_backend.core.request import NO_TOKENS_STOP, ScheduledRequest
from pocket_backend.core.step import ExecuteRequest

Ask = Callable[[ScheduledRequest, int, int], ExecuteRequest]
"""``execute_request``, or a form of it that knows more."""


def execute_request(sequence: ScheduledRequest, count: int, block_size: int) -> ExecuteRequest:
    """What the executor gets for the next ``count`` tokens of ``sequence``.

    Whole for a sequence that is new to its slot, a delta of the block table otherwise; what is sent
    is noted in ``sequence`` and not sent again.
    """
    # Arguments are positional, in the order of the fields: this runs per sequence and step.
    begin = sequence.num_computed_tokens
    tokens = sequence.tokens
    known = len(tokens)
    output_index = known - sequence.num_prompt_tokens
    newest_only = begin == known - 1
    if newest_only and output_index and begin % block_size and not sequence.is_new:
        # The common case: inside a block that the executor knows.
        return ExecuteRequest(
            sequence.sequence_id,
            (tokens[begin],),
            sequence.slot_id,
            False,
            sequence.sampling_params,
            None,
            begin,
            False,
            (),
            True,
            output_index,
            sequence.seed,
        )
    table = sequence.blocks
    assert table is not None
    is_new = sequence.is_new
    block_ids = tuple(table.block_ids[sequence.num_sent_blocks :])
    sequence.num_sent_blocks = len(table.block_ids)
    sequence.is_new = False
    params = sequence.sampling_params
    return ExecuteRequest(
        sequence.sequence_id,
        tuple(tokens[begin : begin + count]),
        sequence.slot_id,
        not newest_only or not output_index,
        params,
        None,
        begin,
        is_new,
        block_ids,
        begin + count == known,
        output_index,
        sequence.seed,
        0,
        sequence.pending_copies,
        tokens if is_new and params.needs_known_tokens else None,
        sequence.stop_ids if is_new and params.min_tokens else NO_TOKENS_STOP,
    )
