"""One engine step at a time, on one thread: scheduler, executor and output stage together.

``EngineLoop`` calls this from the engine thread; tests call it directly, with a clock of their own.
Nothing here waits, locks or starts threads.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pocket_backend.api import BackendUnavailableError, EngineError, PocketLLMError
from pocket_backend.core import ContinuousBatchScheduler, SchedulerConfig
from pocket_backend.engine.output import RequestOutput, merge_events
from pocket_backend.engine.stats import EngineCounters, EngineStats, make_stats
from pocket_backend.observability import names
from pocket_backend.observability.logging import get_logger, log_event, prompts_are_logged
from pocket_backend.text.bad_words import BadWords

if TYPE_CHECKING:
    from pocket_backend.api import FinishReason, GenerationRequest, TokenEvent
    from pocket_backend.core import ScheduledRequest, SequenceUpdate, StepPlan
    from pocket_backend.core.step import ExecuteOutput
    from pocket_backend.engine.streams import EventSink
    from pocket_backend.executors.base import BackendExecutor
    from pocket_backend.text.token_bytes import TokenBytes

_log = get_logger("engine")
_NO_TEXT = "producing this request's text failed"
_STATS_SECONDS = 0.1
"""A snapshot costs some microseconds; readers do not need one per step."""


class FatalEngineError(Exception):
    """The engine cannot go on; everything open has to be failed."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What an iteration did, for hooks. All zero but ``events`` and ``finished`` if no step ran."""

    seconds: float = 0.0
    """Time in ``execute_model``."""
    began: float = 0.0
    """When it was called, on the engine's clock."""
    ended: float = 0.0
    sequences: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    failed: bool = False
    events: int = 0
    """Events delivered to sinks since the last report."""
    plan: StepPlan | None = None
    """What ran. Its sequences go on changing: a hook copies what it keeps."""
    finished: tuple[RequestEntry, ...] = ()
    """Requests whose last event was delivered since the last report."""


_NOTHING = StepReport()


@dataclass(slots=True, eq=False)
class RequestEntry:
    """A submitted request: what the client asked and where its events go. One output per choice.

    Made on the caller's thread; from ``EngineLoop.submit`` on, the engine thread's.
    """

    request: GenerationRequest
    sink: EventSink
    outputs: list[RequestOutput]
    open_choices: int = field(init=False)
    sequence: ScheduledRequest | None = None
    """The first choice's sequence once the scheduler has accepted it."""

    def __post_init__(self) -> None:
        self.open_choices = len(self.outputs)

    @property
    def finished(self) -> bool:
        return self.open_choices == 0


class EngineStepper:
    """Owns scheduler and executor. Engine thread only, except ``entry`` and the attributes that are
    documented as readable from anywhere."""

    def __init__(
        self,
        scheduler: ContinuousBatchScheduler,
        executor: BackendExecutor,
        *,
        token_bytes: TokenBytes | None,
        clock: Callable[[], float],
        failure_limit: int = 8,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.backend_name = type(executor).__name__
        self.capacity_tokens = scheduler.memory.num_blocks * scheduler.memory.block_size
        """KV tokens of the pool (readable from anywhere)."""
        self.counters = EngineCounters()
        histograms = self.counters.histograms
        self._step_seconds = histograms[names.STEP_SECONDS.name]
        self._batch_size = histograms[names.BATCH_SIZE.name]
        self._step_tokens = histograms[names.STEP_TOKENS.name]
        self._inter_token = histograms[names.INTER_TOKEN_SECONDS.name]
        self.stats = EngineStats()
        """The last snapshot (readable from anywhere: replaced as a whole)."""
        self.executing = False
        """Whether ``execute_model`` is running (readable from anywhere)."""
        self.on_finish: Callable[[RequestEntry], None] = lambda _entry: None
        """Called right before the last event of a request is delivered."""
        self._token_bytes = token_bytes
        self._clock = clock
        self._failure_limit = failure_limit
        self._failures_in_a_row = 0
        self._entries: dict[str, RequestEntry] = {}
        self._with_bad_words = 0
        """Open requests whose output is filtered."""
        self._report = _NOTHING
        self._events = 0
        """Delivered since the last report."""
        self._finished: list[RequestEntry] = []
        """Since the last report."""
        self._unchecked = False
        self._stats_at = float("-inf")
        self._closed = False
        self._snapshot(self._clock())

    @classmethod
    def build(
        cls,
        executor: BackendExecutor,
        *,
        max_batch_size: int,
        max_total_tokens: int,
        max_num_batched_tokens: int | None,
        max_model_len: int,
        max_queue: int,
        eos_token_ids: frozenset[int],
        enable_prefix_caching: bool,
        default_deadline_seconds: float | None,
        token_bytes: TokenBytes | None,
        failure_limit: int,
        clock: Callable[[], float],
    ) -> EngineStepper:
        """A stepper with a scheduler for ``executor`` within the given limits.

        Raises:
            ConfigurationError: the limits cannot work.
        """
        memory = executor.get_memory_info()
        memory = replace(
            memory,
            num_blocks=max(1, min(memory.num_blocks, max_total_tokens // memory.block_size)),
            max_context=max_model_len,
        )
        config = SchedulerConfig(
            max_queue=max_queue,
            max_running=max_batch_size,
            max_batch_tokens=max_num_batched_tokens,
            enable_prefix_cache=enable_prefix_caching and executor.supports_feature("prefix_cache"),
            block_copies=executor.supports_feature("block_copies"),
            default_deadline_seconds=default_deadline_seconds,
            seed=secrets.randbits(63),
        )
        scheduler = ContinuousBatchScheduler(memory, config, eos_token_ids=eos_token_ids)
        return cls(
            scheduler,
            executor,
            token_bytes=token_bytes,
            clock=clock,
            failure_limit=failure_limit,
        )

    def entry(self, request: GenerationRequest, sink: EventSink) -> RequestEntry:
        """Prepare a validated request that arrives now. Any thread.

        Raises:
            InvalidRequestError: a stop string or bad word that is not Unicode text.
        """
        arrival = self._clock()
        params, bad_words = request.sampling_params, None
        if params.bad_words and self._token_bytes is not None:
            bad_words = BadWords(
                params.bad_words,
                self._token_bytes,
                skip_special_tokens=params.skip_special_tokens,
            )
        outputs = [
            RequestOutput(request, arrival, self._token_bytes, choice, bad_words)
            for choice in range(params.n)
        ]
        if params.prompt_logprobs is not None:
            # Every prompt token has to be computed: a namespace of its own finds nothing cached.
            # What it does find after a preemption, it has reported.
            salt = f"prompt-logprobs:{secrets.token_hex(16)}"
            request = replace(request, cache_salt=salt)
        return RequestEntry(request, sink, outputs)

    # --- commands -----------------------------------------------------------------------------

    def add(self, entry: RequestEntry) -> None:
        """Queue the request; a refusal by the scheduler is its last event."""
        if entry.finished:  # failed meanwhile: the engine died
            return
        self._unchecked = True
        self._entries[entry.request.request_id] = entry
        self._with_bad_words += entry.outputs[0].bad_words is not None
        try:
            entry.sequence = self.scheduler.add_request(
                entry.request, now=entry.outputs[0].times.arrival
            )
        except PocketLLMError as error:
            self.fail(entry, error)

    def cancel(self, entry: RequestEntry) -> None:
        """End the request with ``cancelled``; harmless if it has ended."""
        self._end(entry, "cancelled", None)

    def fail(self, entry: RequestEntry, error: Exception) -> None:
        """End the request with ``error``; harmless if it has ended."""
        self._end(entry, "error", error)

    # --- stepping -----------------------------------------------------------------------------

    def step(self, drain: Callable[[], None]) -> bool:
        """Run one step; false if there was nothing to do. ``drain`` runs the inbox's commands and
        is called between execution and update.

        Raises:
            FatalEngineError: the executor is gone or keeps failing.
        """
        plan = self.scheduler.schedule(self._clock())
        if plan is None:
            return False
        for slot in plan.reset_slots:
            self.executor.reset_slot(slot)
        for update in plan.finished:
            self._apply(update, self._clock())
        if not plan.requests:
            return True
        if self._with_bad_words:
            self._ban_words(plan)
        started = self._clock()
        failure: Exception | None = None
        updates: tuple[SequenceUpdate, ...] = ()
        self.executing = True
        try:
            outputs = self.executor.execute_model(plan.requests)
        except Exception as error:  # noqa: BLE001  (whatever it is, only this step failed)
            failure = error
        finally:
            self.executing = False
        now = self._clock()
        drain()
        if failure is None:
            try:
                updates = self.scheduler.update(plan, outputs, now)
                self._take_prompt_logprobs(plan, outputs)
            except EngineError as error:  # outputs that do not belong to the plan
                failure = error
        if failure is None:
            self._failures_in_a_row = 0
        else:
            updates = self._fail_step(plan, failure)
        counters = self.counters
        counters.steps += 1
        counters.failed_steps += failure is not None
        self._step_seconds.observe(now - started)
        self._batch_size.observe(len(plan.requests))
        self._step_tokens.observe(plan.num_tokens)
        self._report = StepReport(
            seconds=now - started,
            began=started,
            ended=now,
            sequences=len(plan.requests),
            tokens=plan.num_tokens,
            prefill_tokens=plan.num_prefill_tokens,
            failed=failure is not None,
            plan=plan,
        )
        for update in updates:
            self._apply(update, now)
        if now - self._stats_at >= _STATS_SECONDS:
            self._snapshot(now)
        if failure is not None:
            self._check_alive(failure)
        return True

    def refresh_stats(self) -> None:
        """Take the snapshot now."""
        self._snapshot(self._clock())

    def idle(self) -> None:
        """Nothing can run: refresh the snapshot and, once per idle time, check the accounting."""
        self._snapshot(self._clock())
        if self._entries or not self._unchecked:
            return
        self._unchecked = False
        try:
            self.scheduler.check_integrity()
        except Exception as error:  # noqa: BLE001  (reported, never fatal to users)
            self.counters.integrity_failures += 1
            self._snapshot(self._clock())
            log_event(_log, logging.ERROR, "integrity check failed", exc_info=error)

    def next_deadline(self) -> float | None:
        """When the next open request expires, on the engine's clock.

        Asked only when nothing can run, so a walk over what is open costs nobody anything.
        """
        default = self.scheduler.config.default_deadline_seconds
        times = []
        for entry in self._entries.values():
            seconds = entry.request.deadline_seconds or default
            if seconds is not None:
                times.append(entry.outputs[0].times.arrival + seconds)
        return min(times, default=None)

    def take_report(self) -> StepReport | None:
        """What happened since the last call; None if nothing did."""
        if not self._events and not self._report.sequences:
            return None
        report = replace(self._report, events=self._events, finished=tuple(self._finished))
        self._report, self._events = _NOTHING, 0
        self._finished.clear()
        return report

    def close(self) -> None:
        """Release the executor (once). Nothing may be open any more."""
        if self._closed:
            return
        self._closed = True
        self._snapshot(self._clock())
        try:
            self.executor.close()
        except Exception as error:  # noqa: BLE001  (shutting down: nobody could act on it)
            log_event(_log, logging.ERROR, "closing the executor failed", exc_info=error)

    # --- details ------------------------------------------------------------------------------

    def _fail_step(self, plan: StepPlan, failure: Exception) -> tuple[SequenceUpdate, ...]:
        self._failures_in_a_row += 1
        log_event(
            _log,
            logging.ERROR,
            "step failed",
            exc_info=failure,
            sequences=len(plan.requests),
            in_a_row=self._failures_in_a_row,
        )
        if not isinstance(failure, PocketLLMError):
            reason = EngineError(f"computing this request failed: {failure}")
            reason.__cause__ = failure
            failure = reason
        return self.scheduler.fail_step(plan, failure)

    def _check_alive(self, failure: Exception) -> None:
        if isinstance(failure, BackendUnavailableError):
            raise FatalEngineError(f"the backend is gone: {failure}") from failure
        if self._failures_in_a_row >= self._failure_limit:
            raise FatalEngineError(
                f"{self._failures_in_a_row} steps failed in a row, the last with: {failure}"
            ) from failure

    def _ban_words(self, plan: StepPlan) -> None:
        """Tell the executor which tokens would complete a bad word in this step."""
        for request, sequence in zip(plan.requests, plan.sequences, strict=True):
            entry = self._entries.get(sequence.request_id)
            words = entry.outputs[sequence.choice_index].bad_words if entry is not None else None
            if words is None:
                continue
            if request.is_new:
                request.never_ids = words.always
            if request.samples:
                request.banned_ids = words.banned()

    def _take_prompt_logprobs(self, plan: StepPlan, outputs: Sequence[ExecuteOutput]) -> None:
        for asked, sequence, output in zip(plan.requests, plan.sequences, outputs, strict=True):
            if output.prompt_logprobs:
                entry = self._entries.get(sequence.request_id)
                if entry is not None:
                    kept = entry.outputs[sequence.choice_index]
                    kept.push_prompt(asked.start_position + 1, output.prompt_logprobs)

    def _apply(self, update: SequenceUpdate, now: float) -> None:
        """Output stage of one sequence. A failure here fails its request only."""
        entry = self._entries.get(update.request_id)
        if entry is None:
            return
        output = entry.outputs[update.choice_index]
        if output.finished:
            return
        event: TokenEvent | None = None
        earlier, previous = output.num_tokens, output.times.last_token
        try:
            for token in update.token_ids:
                piece = output.push(token, now, update.logprobs)
                if piece is not None:
                    event = piece if event is None else merge_events(event, piece)
                if output.stop_string is not None:
                    break
        except Exception as error:  # noqa: BLE001  (a bug in text handling is one request's)
            self._log_output_failure(entry, error)
            self._count_tokens(entry, output, earlier, previous, now)
            self.fail(entry, EngineError(f"{_NO_TEXT}: {error}"))
            return
        self._count_tokens(entry, output, earlier, previous, now)
        if output.stop_string is not None:
            if update.finish_reason is None:
                self.scheduler.finish(update.request_id, "stop", update.choice_index)
            self._finish(entry, output, "stop", now, stop_reason=output.stop_string, pending=event)
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
        counters = self.counters
        counters.generated_tokens += new
        if previous is not None:
            self._inter_token.observe(now - previous)
        elif output.choice_index == 0:
            counters.prompt_tokens += output.prompt_tokens
            if entry.sequence is not None:
                counters.cached_tokens += entry.sequence.cached_tokens

    def _log_output_failure(self, entry: RequestEntry, error: Exception) -> None:
        log_event(
            _log,
            logging.ERROR,
            "output stage failed",
            exc_info=error,
            request_id=entry.request.request_id,
        )

    def _end(self, entry: RequestEntry, reason: FinishReason, error: Exception | None) -> None:
        if entry.finished:
            return
        self._drop(entry)
        now = self._clock()
        for output in entry.outputs:
            if not output.finished:
                self._finish(entry, output, reason, now, error=error)

    def _drop(self, entry: RequestEntry) -> None:
        """Take the request out of the scheduler. Its client gets a last event even if that fails:
        then the loop finds the scheduler broken in the next step."""
        try:
            self.scheduler.cancel(entry.request.request_id)
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
        if self._entries.pop(request.request_id, None) is not None:
            self._with_bad_words -= entry.outputs[0].bad_words is not None
        self._finished.append(entry)
        reason = event.finish_reason or "error"
        self.counters.requests[reason] += 1
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
        self._events += 1
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

    def _snapshot(self, now: float) -> None:
        self._stats_at = now
        self.stats = make_stats(self.scheduler.stats(), self.counters, self.scheduler.memory)


def _note_admission(entry: RequestEntry, output: RequestOutput) -> None:
    """What only the scheduler knows of a choice that ends."""
    sequence = entry.sequence
    if sequence is not None:
        output.times.first_scheduled = sequence.first_scheduled_time
        output.cached_tokens = sequence.cached_tokens
