"""The output stage: what the scheduler says of sequences becomes events for clients.

Owner of the open requests. A failure in here (text handling, a sink that raises) is one request's.
Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pocket_backend.api import EngineError
from pocket_backend.engine.output import RequestOutput, merge_events
from pocket_backend.observability import names
from pocket_backend.observability.logging import get_logger, log_event, prompts_are_logged

if TYPE_CHECKING:
    from pocket_backend.api import FinishReason, TokenEvent
    from pocket_backend.core import ContinuousBatchScheduler, SequenceUpdate, StepPlan
    from pocket_backend.core.step import ExecuteOutput
    from pocket_backend.engine.entries import RequestEntry
    from pocket_backend.engine.stats import EngineCounters

_log = get_logger("engine")
_NO_TEXT = "producing this request's text failed"


class OutputStage:
    """Applies updates to the outputs of open requests, counts, logs and delivers."""

    def __init__(
        self,
        scheduler: ContinuousBatchScheduler,
        counters: EngineCounters,
        clock: Callable[[], float],
    ) -> None:
        self.entries: dict[str, RequestEntry] = {}
        """Open requests by id."""
        self.on_finish: Callable[[RequestEntry], None] = lambda _entry: None
        """Called right before the last event of a request is delivered."""
        self.events = 0
        """Delivered since the last ``take_news``."""
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._inter_token = counters.histograms[names.INTER_TOKEN_SECONDS.name]
        self._with_bad_words = 0
        """Open requests whose output is filtered."""
        self._with_prompt_logprobs = 0
        """Open requests that ask for them."""
        self._finished: list[RequestEntry] = []
        """Since the last ``take_news``."""

    def open(self, entry: RequestEntry) -> None:
        """Events of the request will be delivered from now on."""
        self.entries[entry.request.request_id] = entry
        self._count_options(entry, 1)

    def take_news(self) -> tuple[int, tuple[RequestEntry, ...]]:
        """Events delivered and requests finished since the last call."""
        news = self.events, tuple(self._finished)
        self.events = 0
        self._finished.clear()
        return news

    # --- before and after a step --------------------------------------------------------------

    def ban_words(self, plan: StepPlan) -> None:
        """Tell the executor which tokens would complete a bad word in this step."""
        if not self._with_bad_words:
            return
        for request, sequence in zip(plan.requests, plan.sequences, strict=True):
            entry = self.entries.get(sequence.request_id)
            words = entry.outputs[sequence.choice_index].bad_words if entry is not None else None
            if words is None:
                continue
            if request.is_new:
                request.never_ids = words.always
            if request.samples:
                request.banned_ids = words.banned()

    def take_prompt_logprobs(self, plan: StepPlan, outputs: Sequence[ExecuteOutput]) -> None:
        if not self._with_prompt_logprobs:
            return
        for asked, sequence, output in zip(plan.requests, plan.sequences, outputs, strict=True):
            if output.prompt_logprobs:
                entry = self.entries.get(sequence.request_id)
                if entry is not None:
                    kept = entry.outputs[sequence.choice_index]
                    kept.push_prompt(asked.start_position + 1, output.prompt_logprobs)

    def apply(self, update: SequenceUpdate, now: float) -> None:
        """Output stage of one sequence. A failure here fails its request only."""
        sequence = update.request
        entry = self.entries.get(sequence.request_id)
        if entry is None:
            return
        output = entry.outputs[sequence.choice_index]
        if output.finished:
            return
        event: TokenEvent | None = None
        stopped: str | None = None
        earlier, previous = output.num_tokens, output.times.last_token
        try:
            for token in update.token_ids:
                piece = output.push(token, now, update.logprobs)
                if piece is not None:
                    event = piece if event is None else merge_events(event, piece)
                stopped = output.stop_string
                if stopped is not None:
                    break
        except Exception as error:  # noqa: BLE001  (a bug in text handling is one request's)
            self._log_output_failure(entry, error)
            self._count_tokens(entry, output, earlier, previous, now)
            self.end(entry, "error", EngineError(f"{_NO_TEXT}: {error}"))
            return
        self._count_tokens(entry, output, earlier, previous, now)
        if stopped is not None:
            if update.finish_reason is None:
                self._scheduler.finish(sequence.request_id, "stop", sequence.choice_index)
            self._finish(entry, output, "stop", now, stop_reason=stopped, pending=event)
        elif update.finish_reason is not None:
            reason: FinishReason = update.finish_reason  # type: ignore[assignment]
            self._finish(
                entry,
                output,
                reason,
                now,
                stop_reason=update.stop_reason,
                error=update.error,
                pending=event,
            )
        elif event is not None:
            self._deliver(entry, event)

    def end(self, entry: RequestEntry, reason: FinishReason, error: Exception | None) -> None:
        if entry.finished:
            return
        self._drop(entry)
        now = self._clock()
        for output in entry.outputs:
            if not output.finished:
                self._finish(entry, output, reason, now, error=error)

    # --- details ------------------------------------------------------------------------------

    def _count_tokens(
        self,
        entry: RequestEntry,
        output: RequestOutput,
        earlier: int,
        previous: float | None,
        now: float,
    ) -> None:
        """Account for the tokens that ``output`` took in at ``now``, after ``earlier`` ones of
        which the last came at ``previous``."""
        new = output.num_tokens - earlier
        if not new:
            return
        counters = self._counters
        counters.generated_tokens += new
        if previous is not None:
            self._inter_token.observe(now - previous)
        elif output.choice_index == 0:
            counters.prompt_tokens += output.prompt_tokens
            if entry.sequence is not None:
                counters.cached_tokens += entry.sequence.cached_tokens

    def _count_options(self, entry: RequestEntry, change: int) -> None:
        """What asks for work in each step, so that a step without it does none."""
        if entry.outputs[0].bad_words is not None:
            self._with_bad_words += change
        if entry.request.sampling_params.prompt_logprobs is not None:
            self._with_prompt_logprobs += change

    def _log_output_failure(self, entry: RequestEntry, error: Exception) -> None:
        log_event(
            _log,
            logging.ERROR,
            "output stage failed",
            exc_info=error,
            request_id=entry.request.request_id,
        )

    def _drop(self, entry: RequestEntry) -> None:
        """Take the request out of the scheduler. Its client gets a last event even if that fails:
        then the loop finds the scheduler broken in the next step."""
        try:
            self._scheduler.cancel(entry.request.request_id)
        except Exception as error:  # noqa: BLE001
            log_event(
                _log,
                logging.CRITICAL,
                "the scheduler could not drop a request",
                exc_info=error,
                request_id=entry.request.request_id,
            )

    def _finish(
        self,
        entry: RequestEntry,
        output: RequestOutput,
        reason: FinishReason,
        now: float,
        *,
        stop_reason: str | int | None = None,
        error: Exception | None = None,
        pending: TokenEvent | None = None,
    ) -> None:
        """End one choice; the last one ends the request."""
        _note_admission(entry, output)
        entry.open_choices -= 1
        last = entry.open_choices == 0
        try:
            event = output.finish(
                reason, now, stop_reason=stop_reason, error=error, pending=pending, last=last
            )
        except Exception as broken:  # noqa: BLE001  (a bug in text handling is one request's)
            self._log_output_failure(entry, broken)
            event = output.give_up(EngineError(f"{_NO_TEXT}: {broken}"), now, last=last)
        if event.last:
            self._close_entry(entry, event)
        self._deliver(entry, event)

    def _close_entry(self, entry: RequestEntry, event: TokenEvent) -> None:
        """Account for a request whose last event is about to go out, and log its one line."""
        request = entry.request
        if self.entries.pop(request.request_id, None) is not None:
            self._count_options(entry, -1)
        self._finished.append(entry)
        reason = event.finish_reason or "error"
        self._counters.requests[reason] += 1
        self.on_finish(entry)
        timings = event.timings
        log_event(
            _log,
            logging.WARNING if event.error is not None else logging.INFO,
            "request finished",
            request_id=request.request_id,
            client_request_id=request.metadata.get("client_request_id") or None,
            reason=reason,
            stop_reason=event.stop_reason if isinstance(event.stop_reason, int) else None,
            prompt_tokens=len(request.prompt_tokens),
            completion_tokens=sum(output.num_tokens for output in entry.outputs),
            cached_tokens=entry.outputs[0].cached_tokens,
            choices=len(entry.outputs),
            priority=request.priority,
            queue_seconds=timings.queue_seconds if timings else None,
            prefill_seconds=timings.prefill_seconds if timings else None,
            decode_seconds=timings.decode_seconds if timings else None,
            ttft_seconds=timings.ttft_seconds if timings else None,
            tpot_seconds=timings.tpot_seconds if timings else None,
            total_seconds=timings.total_seconds if timings else None,
            error=event.error,
            prompt_token_ids=list(request.prompt_tokens) if prompts_are_logged() else None,
        )

    def _deliver(self, entry: RequestEntry, event: TokenEvent) -> None:
        self.events += 1
        try:
            entry.sink(event)
        except Exception as error:  # noqa: BLE001  (its client is gone, nobody else's business)
            request_id = entry.request.request_id
            log_event(_log, logging.WARNING, "sink raised", exc_info=error, request_id=request_id)
            if not entry.finished:
                self._abandon(entry, event)

    def _abandon(self, entry: RequestEntry, event: TokenEvent) -> None:
        """End a request whose sink raised: nothing is delivered any more."""
        self._drop(entry)
        now = self._clock()
        entry.open_choices = 0
        for output in entry.outputs:
            if not output.finished:
                _note_admission(entry, output)
                event = output.finish("cancelled", now, last=True)
        self._close_entry(entry, event)


def _note_admission(entry: RequestEntry, output: RequestOutput) -> None:
    """What only the scheduler knows of a choice that ends."""
    sequence = entry.sequence
    if sequence is not None:
        output.times.first_scheduled = sequence.first_scheduled_time
        output.cached_tokens = sequence.cached_tokens
