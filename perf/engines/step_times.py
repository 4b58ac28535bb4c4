"""Where the time between two native calls goes: stamps around an engine's own seams.

A stamp costs about a microsecond, since right after a step the clock's code has left the caches as
well; so the parts are measured in runs of their own, not in those that tell how long the whole is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pocket_backend import UnifiedEngine

COMPUTE = "compute"
GAP = "gap"
PARTS: Mapping[str, str] = {
    "results": "reading what the native call returned",
    "update": "taking it into the scheduler",
    "deliver": "text, events to the sinks, counters, hooks and the loop",
    "schedule": "deciding the next step",
    "arrays": "the next call's arguments",
}
"""Of the gap, in order."""


class StepTimes:
    """Times the steps of ``engine``; make it before the first one.

    The native call of the C++ engine counts as computing; of another executor all of
    ``execute_model``. Written by the engine thread, read while it idles.
    """

    def __init__(self, engine: UnifiedEngine, *, parts: bool = False) -> None:
        self._stamps: list[tuple[str, float, int]] = []
        """(part that begins, when, tokens of the step if it is the computing)."""
        stepper = engine._stepper
        executor: Any = stepper.executor
        scheduler: Any = stepper.scheduler
        native = getattr(executor, "_engine", None)
        if hasattr(native, "step"):
            step = self._timed(native.step, lambda **named: len(named["token_ids"]))
            executor._engine = _NativeWith(native, step)
        else:
            executor.execute_model = self._timed(executor.execute_model, _tokens)
        if parts:
            executor.execute_model = self._stamped("arrays", executor.execute_model, "update")
            scheduler.schedule = self._stamped("schedule", scheduler.schedule)
            scheduler.update = self._stamped(None, scheduler.update, "deliver")

    def take(self, tokens: int) -> dict[str, tuple[float, ...]]:
        """Seconds by part of the steps since the last call, one value a step: ``compute``, ``gap``
        and, if asked for, ``PARTS``. Only of steps that computed ``tokens`` tokens after another
        one that did."""
        stamps, self._stamps = self._stamps, []
        found: dict[str, list[float]] = {}
        starts = [index for index, stamp in enumerate(stamps) if stamp[0] == COMPUTE]
        for first, second in pairwise(starts):
            if not stamps[first][2] == stamps[second][2] == tokens:
                continue
            ended, again = stamps[first + 1][1], stamps[second][1]
            found.setdefault(COMPUTE, []).append(ended - stamps[first][1])
            found.setdefault(GAP, []).append(again - ended)
            for (part, begin, _), (_, end, _) in pairwise(stamps[first + 1 : second + 1]):
                if second - first > 2:
                    found.setdefault(part, []).append(end - begin)
        return {part: tuple(values) for part, values in found.items()}

    def _stamped(
        self, before: str | None, call: Callable[..., Any], after: str | None = None
    ) -> Callable[..., Any]:
        def stamped(*arguments: Any) -> Any:
            if before is not None:
                self._stamps.append((before, time.perf_counter(), 0))
            result = call(*arguments)
            if after is not None:
                self._stamps.append((after, time.perf_counter(), 0))
            return result

        return stamped

    def _timed(self, call: Callable[..., Any], tokens: Callable[..., int]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments, **named)
            ended = time.perf_counter()
            self._stamps.append((COMPUTE, began, tokens(*arguments, **named)))
            self._stamps.append(("results", ended, 0))
            return result

        return timed


class _NativeWith:
    """The native engine with another ``step``."""

    def __init__(self, native: Any, step: Callable[..., Any]) -> None:
        self._native = native
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def _tokens(requests: Any) -> int:
    return sum(len(request.token_ids) for request in requests)
