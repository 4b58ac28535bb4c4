"""The rules of the Trace Event Format that our traces must keep, as one check.

From the format's public description: which fields each phase needs, complete slices of one thread
nest and never overlap partly, asynchronous slices of one id close in reverse order of opening, and
every process and thread that is used has a name.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
_FIELDS = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "ts", "args"},
    "b": {"name", "cat", "id", "pid", "tid", "ts"},
    "e": {"name", "cat", "id", "pid", "tid", "ts"},
    "M": {"name", "pid", "args"},
}


def check_trace(document: Mapping[str, Any]) -> list[Event]:
    """The events other than metadata. AssertionError names the first event that is wrong."""
    document = json.loads(json.dumps(document, allow_nan=False))
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    for event in events:
        missing = _FIELDS[event["ph"]] - event.keys()
        assert not missing, f"{event} lacks {missing}"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event.get("tid", 0), int)
        assert event.get("ts", 0) >= 0, event
        assert isinstance(event.get("args", {}), dict), event
    rest = [event for event in events if event["ph"] != "M"]
    assert [e["ts"] for e in rest] == sorted(e["ts"] for e in rest), "not in order of time"
    _check_names(events, rest)
    _check_slices(rest)
    _check_async(rest)
    for event in rest:
        if event["ph"] == "C":
            assert event["args"], event
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
    return rest


def slices(events: Sequence[Event], pid: int, tid: int | None = None) -> list[Event]:
    """Complete slices of a process, or of one of its threads, in the order of the file."""
    return [
        event
        for event in events
        if event["ph"] == "X" and event["pid"] == pid and tid in (None, event["tid"])
    ]


def _check_names(events: Sequence[Event], rest: Sequence[Event]) -> None:
    processes = {e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"]}
    threads = {
        (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"]
    }
    for event in rest:
        assert event["pid"] in processes, event
        assert (event["pid"], event["tid"]) in threads, event


def _check_slices(events: Sequence[Event]) -> None:
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        begin, end = event["ts"], event["ts"] + event["dur"]
        assert event["dur"] >= 0, event
        stack = open_until[event["pid"], event["tid"]]
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1], f"{event} ends after the slice around it"
        stack.append(end)


def _check_async(events: Sequence[Event]) -> None:
    stacks: dict[tuple[str, str], list[str]] = defaultdict(list)
    for event in events:
        key = (event.get("cat", ""), event.get("id", ""))
        if event["ph"] == "b":
            stacks[key].append(event["name"])
        elif event["ph"] == "e":
            assert stacks[key], f"{event} closes nothing"
            assert stacks[key].pop() == event["name"], f"{event} is not the innermost"
    assert not any(stacks.values()), "slices that never end"
