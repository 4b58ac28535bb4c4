"""The step hook that fills a ``StepRecorder``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pocket_backend.observability.steps import SequenceRecord, StepPart, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pocket_backend.core import StepPlan
    from pocket_backend.engine.entries import RequestEntry, StepReport
    from pocket_backend.engine.loop import StepHook
    from pocket_backend.observability.steps import StepRecorder


def record_steps(recorder: StepRecorder) -> StepHook:
    """A hook for ``UnifiedEngine(on_step_end=...)`` or ``add_step_hook``.

    What the last step of a request did is recorded shortly after the request's last event:
    ``UnifiedEngine.close`` waits for it.
    """

    def record(report: StepReport) -> None:
        if report.plan is not None:
            recorder.add_step(
                StepRecord(
                    report.began,
                    report.ended,
                    tuple(_parts(report.plan)),
                    report.tokens,
                    report.prefill_tokens,
                    report.failed,
                )
            )
        for entry in report.finished:
            for ended in _ended(entry):
                recorder.add_sequence(ended)

    return record


def _parts(plan: StepPlan) -> Iterator[StepPart]:
    for asked, sequence in zip(plan.requests, plan.sequences, strict=True):
        yield StepPart(
            sequence.sequence_id,
            asked.slot_id,
            asked.start_position,
            len(asked.token_ids),
            asked.is_prefill,
            asked.is_new,
        )


def _ended(entry: RequestEntry) -> Iterator[SequenceRecord]:
    request_id = entry.request.request_id
    for output in entry.outputs:
        times = output.times
        assert times.finished is not None
        name = request_id if len(entry.outputs) == 1 else f"{request_id}#{output.choice_index}"
        yield SequenceRecord(
            sequence=name,
            request_id=request_id,
            arrival=times.arrival,
            finished=times.finished,
            reason=output.finish_reason or "error",
            prompt_tokens=output.prompt_tokens,
            cached_tokens=output.cached_tokens,
            output_tokens=output.num_tokens,
            first_scheduled=times.first_scheduled,
            first_token=times.first_token,
            last_token=times.last_token,
        )
