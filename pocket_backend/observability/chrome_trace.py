"""Recorded steps in the Trace Event Format, which Perfetto and ``chrome://tracing`` show.

Three processes: *engine* (one slice a step, and a counter of the tokens in it), *slots* (a thread a
slot: each stay of a sequence, with its prefill chunks and decode runs inside) and *requests* (one
track a sequence: queue, prefill, decode, preempted). Times are whole microseconds since the first
event, so that slices which touch in time touch in the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pocket_backend.observability.steps import SequenceRecord, StepRecord
from pocket_backend.observability.timeline import NO_SLOT, Phase, Timeline, timelines

Event = dict[str, object]
_ENGINE, _SLOTS, _REQUESTS = 1, 2, 3
_PROCESSES = {_ENGINE: "engine", _SLOTS: "slots", _REQUESTS: "requests"}
_ONLY_THREAD = 1


def chrome_trace(
    steps: Sequence[StepRecord],
    ended: Sequence[SequenceRecord],
    about: dict[str, object] | None = None,
) -> dict[str, object]:
    """The JSON object of a trace; ``about`` goes into ``otherData``."""
    lives = timelines(steps, ended)
    times = [*(step.began for step in steps), *(life.begin for life in lives)]
    scale = _Scale(min(times, default=0.0))
    events = [
        *_steps(steps, scale),
        *(event for life in lives for event in _stays(life, scale)),
        *(event for number, life in enumerate(lives) for event in _life(life, number, scale)),
    ]
    # Stable: events of one moment stay in the order of their nesting.
    events.sort(key=_ts)
    slots = sorted({phase.slot for life in lives for phase in life.phases} - {NO_SLOT})
    return {
        "traceEvents": [*_names(slots), *events],
        "displayTimeUnit": "ms",
        "otherData": about or {},
    }


def _ts(event: Event) -> int:
    ts = event["ts"]
    assert isinstance(ts, int)
    return ts


class _Scale:
    """Seconds on the engine's clock to microseconds of the trace."""

    def __init__(self, zero: float) -> None:
        self._zero = zero

    def ts(self, seconds: float) -> int:
        return round((seconds - self._zero) * 1e6)

    def span(self, begin: float, end: float) -> Event:
        start = self.ts(begin)
        return {"ts": start, "dur": self.ts(end) - start}


def _names(slots: Sequence[int]) -> Iterator[Event]:
    for pid, name in _PROCESSES.items():
        yield _metadata("process_name", pid, 0, {"name": name})
        yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
    yield _metadata("thread_name", _ENGINE, _ONLY_THREAD, {"name": "steps"})
    yield _metadata("thread_name", _REQUESTS, _ONLY_THREAD, {"name": "requests"})
    for slot in slots:
        yield _metadata("thread_name", _SLOTS, slot + 1, {"name": f"slot {slot}"})
        yield _metadata("thread_sort_index", _SLOTS, slot + 1, {"sort_index": slot})


def _metadata(name: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _steps(steps: Sequence[StepRecord], scale: _Scale) -> Iterator[Event]:
    where = {"pid": _ENGINE, "tid": _ONLY_THREAD}
    for step in steps:
        yield {
            "ph": "X",
            "name": "failed step" if step.failed else "step",
            "cat": "step",
            **where,
            **scale.span(step.began, step.ended),
            "args": {
                "sequences": len(step.parts),
                "tokens": step.tokens,
                "prefill_tokens": step.prefill_tokens,
            },
        }
        decode = step.tokens - step.prefill_tokens
        yield _counter(scale.ts(step.began), step.prefill_tokens, decode)
    if steps:
        yield _counter(scale.ts(steps[-1].ended), 0, 0)


def _counter(ts: int, prefill: int, decode: int) -> Event:
    return {
        "ph": "C",
        "name": "tokens per step",
        "pid": _ENGINE,
        "tid": _ONLY_THREAD,
        "ts": ts,
        "args": {"prefill": prefill, "decode": decode},
    }


def _stays(life: Timeline, scale: _Scale) -> Iterator[Event]:
    """Each stay in a slot: one slice around those of its phases."""
    stay: list[Phase] = []
    for phase in life.phases:
        if phase.slot == NO_SLOT:
            yield from _stay(life, stay, scale)
            stay = []
        else:
            stay.append(phase)
    yield from _stay(life, stay, scale)


def _stay(life: Timeline, phases: Sequence[Phase], scale: _Scale) -> Iterator[Event]:
    if not phases:
        return
    where = {"pid": _SLOTS, "tid": phases[0].slot + 1}
    yield {
        "ph": "X",
        "name": life.sequence,
        "cat": "slot",
        **where,
        **scale.span(phases[0].begin, phases[-1].end),
        "args": _summary(life),
    }
    for phase in phases:
        yield {
            "ph": "X",
            "name": phase.name,
            "cat": "phase",
            **where,
            **scale.span(phase.begin, phase.end),
            "args": _work(phase),
        }


def _life(life: Timeline, number: int, scale: _Scale) -> Iterator[Event]:
    """A nestable asynchronous slice with the phases inside."""
    common = {"cat": "request", "id": f"{number:#x}", "pid": _REQUESTS, "tid": _ONLY_THREAD}

    def at(ph: str, name: str, seconds: float, args: Event) -> Event:
        return {"ph": ph, "name": name, **common, "ts": scale.ts(seconds), "args": args}

    yield at("b", life.sequence, life.begin, _summary(life))
    for phase in life.phases:
        yield at("b", phase.name, phase.begin, _work(phase))
        yield at("e", phase.name, phase.end, {})
    yield at("e", life.sequence, life.end, {})


def _work(phase: Phase) -> Event:
    if phase.slot == NO_SLOT:
        return {}
    return {"start_position": phase.start, "tokens": phase.tokens, "steps": phase.steps}


def _summary(life: Timeline) -> Event:
    record = life.record
    if record is None:
        return {"finish_reason": None}
    return {
        "finish_reason": record.reason,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
    }
