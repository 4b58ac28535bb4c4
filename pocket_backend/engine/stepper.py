"""One engine step at a time, on one thread: scheduler, executor and output stage together.

``EngineLoop`` calls this from the engine thread; tests call it directly, with a clock of their own.
Nothing here waits, locks or starts threads.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pocket_backend.api import BackendUnavailableError, EngineError, PocketLLMError
from pocket_backend.core import ContinuousBatchScheduler, SchedulerConfig
from pocket_backend.engine.delivery import OutputStage
from pocket_backend.engine.entries import RequestEntry, StepReport, make_entry
from pocket_backend.engine.stats import EngineCounters, EngineStats, make_stats
from pocket_backend.observability import names
from pocket_backend.observability.logging import get_logger, log_event

if TYPE_CHECKING:
    from pocket_backend.api import GenerationRequest
    from pocket_backend.core import SequenceUpdate, StepPlan
    from pocket_backend.engine.streams import EventSink
    from pocket_backend.executors.base import BackendExecutor
    from pocket_backend.text.token_bytes import TokenBytes

_log = get_logger("engine")
_STATS_SECONDS = 0.1
"""A snapshot costs some microseconds; readers do not need one per step."""


class FatalEngineError(Exception):
    """The engine cannot go on; everything open has to be failed."""


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
        self.stats = EngineStats()
        """The last snapshot (readable from anywhere: replaced as a whole)."""
        self.outputs = OutputStage(scheduler, self.counters, clock)
        self.executing = False
        """Whether ``execute_model`` is running (readable from anywhere)."""
        self._token_bytes = token_bytes
        self._clock = clock
        self._failure_limit = failure_limit
        self._failures_in_a_row = 0
        self._report: StepReport | None = None
        """Of the last step, if it has not been taken."""
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
        return make_entry(request, sink, self._clock(), self._token_bytes)

    # --- commands -----------------------------------------------------------------------------

    def add(self, entry: RequestEntry) -> None:
        """Queue the request; a refusal by the scheduler is its last event."""
        if entry.finished:  # failed meanwhile: the engine died
            return
        self._unchecked = True
        self.outputs.open(entry)
        try:
            entry.sequence = self.scheduler.add_request(
                entry.request, now=entry.outputs[0].times.arrival
            )
        except PocketLLMError as error:
            self.fail(entry, error)

    def cancel(self, entry: RequestEntry) -> None:
        """End the request with ``cancelled``; harmless if it has ended."""
        self.outputs.end(entry, "cancelled", None)

    def fail(self, entry: RequestEntry, error: Exception) -> None:
        """End the request with ``error``; harmless if it has ended."""
        self.outputs.end(entry, "error", error)

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
            self.outputs.apply(update, self._clock())
        if not plan.requests:
            return True
        self.outputs.ban_words(plan)
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
                self.outputs.take_prompt_logprobs(plan, outputs)
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
            now - started,
            started,
            now,
            len(plan.requests),
            plan.num_tokens,
            plan.num_prefill_tokens,
            failure is not None,
            plan=plan,
        )
        for update in updates:
            self.outputs.apply(update, now)
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
        if self.outputs.entries or not self._unchecked:
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
        for entry in self.outputs.entries.values():
            seconds = entry.request.deadline_seconds or default
            if seconds is not None:
                times.append(entry.outputs[0].times.arrival + seconds)
        return min(times, default=None)

    def take_report(self) -> StepReport | None:
        """What happened since the last call; None if nothing did."""
        report = self._report
        if report is None:
            if not self.outputs.events:
                return None
            report = StepReport()
        self._report = None
        report.events, report.finished = self.outputs.take_news()
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

    def _snapshot(self, now: float) -> None:
        self._stats_at = now
        self.stats = make_stats(self.scheduler.stats(), self.counters, self.scheduler.memory)
