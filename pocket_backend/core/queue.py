"""Waiting requests in the order in which policy admits them."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from pocket_backend.core.request import RequestStatus, ScheduledRequest

_SLACK = 64
"""Entries of cancelled requests that are tolerated beyond the live ones before a clean-up."""

_LPM_REPEATS = 8
"""While its choice does not fit, ``lpm`` looks at the cache again only so many steps later: a look
costs O(window x prefix)."""


class WaitingQueue(ABC):
    """``peek`` names the next to admit; ``pop`` takes exactly that one."""

    @abstractmethod
    def push(self, request: ScheduledRequest) -> None: ...

    @abstractmethod
    def peek(self) -> ScheduledRequest | None: ...

    @abstractmethod
    def pop(self, request: ScheduledRequest) -> None:
        """Remove what ``peek`` has just returned."""

    @abstractmethod
    def forget(self, request: ScheduledRequest) -> None:
        """The request was queued and has just been marked FINISHED."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[ScheduledRequest]: ...


class OrderedQueue(WaitingQueue):
    """By ``ScheduledRequest.order``: O(log n) push and pop, O(1) amortised forget."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], ScheduledRequest]] = []
        self._live = 0

    def push(self, request: ScheduledRequest) -> None:
        heapq.heappush(self._heap, (request.order, request))
        self._live += 1

    def peek(self) -> ScheduledRequest | None:
        heap = self._heap
        while heap and heap[0][1].status is RequestStatus.FINISHED:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self, request: ScheduledRequest) -> None:
        _, popped = heapq.heappop(self._heap)
        assert popped is request
        self._live -= 1

    def forget(self, request: ScheduledRequest) -> None:
        assert request.status is RequestStatus.FINISHED
        self._live -= 1
        if len(self._heap) > 2 * self._live + _SLACK:
            self._heap = [(r.order, r) for r in self]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return self._live

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (r for _, r in self._heap if r.status is not RequestStatus.FINISHED)


class LongestPrefixQueue(WaitingQueue):
    """Longest cached prefix first among the ``window`` oldest; ties by age.

    Ageing: whenever another is admitted before the oldest, the oldest gains a point; with
    ``max_overtakes`` points it is next. So a request waits for at most ``max_overtakes`` admissions
    from the moment when it is the oldest.
    """

    def __init__(
        self, match_length: Callable[[ScheduledRequest], int], window: int, max_overtakes: int
    ) -> None:
        self._match_length = match_length
        self._window = window
        self._max_overtakes = max_overtakes
        self._sorted: list[tuple[tuple[float, int, int], ScheduledRequest]] = []
        self._oldest: ScheduledRequest | None = None
        self._overtakes = 0
        self._choice: ScheduledRequest | None = None
        self._repeats = 0

    def push(self, request: ScheduledRequest) -> None:
        insort(self._sorted, (request.order, request))

    def peek(self) -> ScheduledRequest | None:
        if not self._sorted:
            return None
        if self._choice is not None and self._repeats < _LPM_REPEATS:
            self._repeats += 1
            return self._choice
        oldest = self._sorted[0][1]
        if oldest is not self._oldest:
            self._oldest, self._overtakes = oldest, 0
        best, longest = oldest, -1
        if self._overtakes < self._max_overtakes:
            for _, request in self._sorted[: self._window]:
                length = self._match_length(request)
                if length > longest:
                    best, longest = request, length
        self._choice, self._repeats = best, 0
        return best

    def pop(self, request: ScheduledRequest) -> None:
        if request is not self._oldest:
            self._overtakes += 1
        self._delete(request)

    def forget(self, request: ScheduledRequest) -> None:
        self._delete(request)

    def _delete(self, request: ScheduledRequest) -> None:
        del self._sorted[bisect_left(self._sorted, request.order, key=lambda entry: entry[0])]
        if request is self._choice or not self._sorted:
            self._choice = None

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (request for _, request in self._sorted)
