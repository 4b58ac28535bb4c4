"""Copies a server's log to standard error while it grows, for containers: their log is the stream.

The file in a runtime directory lies in memory there, and would grow as long as the server serves:
what was copied is cut off once it is long. All who write to it append, so that they go on at the
new end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

_PERIOD = 0.25
"""Seconds between two looks."""
_PIECE = 1 << 20


class LogFollower:
    """Context manager; a thread of its own. ``path`` may change: each start has a new file."""

    def __init__(
        self, path: Callable[[], Path | None], sink: IO[bytes], *, keep_bytes: int | None = 8 << 20
    ) -> None:
        """``keep_bytes``: cut the file when it is longer than that; None: never."""
        self._path = path
        self._sink = sink
        self._keep = keep_bytes
        self._known: Path | None = None
        self._position = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(_PERIOD):
            self.copy()
        self.copy()

    def copy(self) -> None:
        """Everything that came since the last time. A file that is gone is no error."""
        path = self._path()
        if path is None:
            return
        if path != self._known:
            self._known, self._position = path, 0
        with contextlib.suppress(OSError), path.open("rb") as log:
            log.seek(self._position)
            while piece := log.read(_PIECE):
                self._sink.write(piece)
                self._position += len(piece)
            self._sink.flush()
            if self._keep is not None and self._position > self._keep:
                os.truncate(path, 0)
                self._position = 0
