"""Which requests' time is up."""

from __future__ import annotations

import heapq
import math

from pocket_backend.api.errors import short_repr
from pocket_backend.core.request import RequestGroup

_SLACK = 64


class DeadlineQueue:
    """Total and queue deadlines in order of time: O(log n) to add, O(1) to find none passed.

    Entries of requests that ended are dropped when their time comes or, since that may be an hour
    later, whenever the heap has doubled.
    """

    __slots__ = ("_cleanup_at", "_count", "_heap", "earliest")

    def __init__(self) -> None:
        self.earliest = math.inf
        """No deadline passes before this time: nothing has to be asked until then."""
        self._heap: list[tuple[float, int, str, RequestGroup]] = []
        self._count = 0
        self._cleanup_at = _SLACK

    def add(
        self, group: RequestGroup, now: float, total: float | None, queue: float | None
    ) -> None:
        """``total`` and ``queue`` are seconds from ``now``; None: no such limit."""
        for seconds, kind in ((total, "total"), (queue, "queue")):
            if seconds is not None:
                self._count += 1
                heapq.heappush(self._heap, (now + seconds, self._count, kind, group))
        if len(self._heap) > self._cleanup_at:
            self._heap = [entry for entry in self._heap if not entry[3].finished]
            heapq.heapify(self._heap)
            self._cleanup_at = 2 * len(self._heap) + _SLACK
        self._note_earliest()

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
        self._note_earliest()
        return None

    def _note_earliest(self) -> None:
        self.earliest = self._heap[0][0] if self._heap else math.inf
