"""Which requests' time is up."""

from __future__ import annotations

import heapq

from pocket_backend.api.errors import short_repr
from pocket_backend.core.request import RequestGroup


class DeadlineQueue:
    """Total and queue deadlines in order of time: O(log n) to add, O(1) to find none passed.

    Entries of requests that ended or started meanwhile are dropped when their time comes.
    """

    __slots__ = ("_count", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, RequestGroup]] = []
        self._count = 0

    def add(
        self, group: RequestGroup, now: float, total: float | None, queue: float | None
    ) -> None:
        """``total`` and ``queue`` are seconds from ``now``; None: no such limit."""
        for seconds, kind in ((total, "total"), (queue, "queue")):
            if seconds is not None:
                self._count += 1
                heapq.heappush(self._heap, (now + seconds, self._count, kind, group))

    def pop_expired(self, now: float) -> tuple[RequestGroup, str] | None:
        """A request whose time is up, with a sentence that says which; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            limit, _, kind, group = heapq.heappop(self._heap)
            if group.finished or (kind == "queue" and group.sequences[0].admitted):
                continue
            arrival = group.sequences[0].arrival_time
            what = (
                f"not started within {limit - arrival:g} s of arrival; the server is busy"
                if kind == "queue"
                else f"not finished within {limit - arrival:g} s of arrival"
            )
            return group, f"request {short_repr(group.request_id)}: {what}"
        return None
