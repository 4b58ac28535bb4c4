"""Requests that arrive at once, however slow the thread that submits them is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pocket_backend.engine.unified import UnifiedEngine


@contextmanager
def arriving_together(engine: UnifiedEngine, count: int) -> Iterator[None]:
    """Holds the engine thread until ``count`` requests have been submitted.

    Else the first may have ended before the last arrives, on a machine short of CPU, and what a
    test says about many at once (preemption, a full queue) is not put to the test.
    """
    arrived = threading.Event()
    submit = engine.submit
    left = count

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        try:
            return submit(*arguments, **options)
        finally:
            left -= 1
            if left <= 0:
                arrived.set()

    engine.submit = counted  # type: ignore[method-assign]
    engine.post(lambda: arrived.wait(60) and None)
    try:
        yield
    finally:
        arrived.set()
        del engine.submit
