"""Closing a client's stream from another thread while this one waits in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pocket_client import Stream

WAIT = 60.0


class _Announcing:
    """A stream's source of chunks that says when somebody reads from it."""

    def __init__(self, chunks: Any) -> None:
        self._chunks = chunks
        self.reading = threading.Event()

    def __next__(self) -> Any:
        self.reading.set()
        return next(self._chunks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunks, name)


@contextmanager
def closed_once_reading(stream: Stream) -> Iterator[None]:
    """Inside, the next read of ``stream`` is met by a ``close`` from another thread.

    The close comes after the read began, however late either thread gets its turn: a read that
    begins afterwards would just find the stream at its end.
    """
    source = _Announcing(stream._chunks)
    stream._chunks = source  # type: ignore[assignment]

    def close() -> None:
        assert source.reading.wait(WAIT)
        stream.close()

    closer = threading.Thread(target=close)
    closer.start()
    try:
        yield
    finally:
        source.reading.set()
        closer.join()
