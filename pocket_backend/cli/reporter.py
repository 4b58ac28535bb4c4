"""What a command in the foreground says: sentences for people, or with `--json` one event a line.

docs/cli.md lists the events. Thread-safe: the gateway's watcher reports, too.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Protocol


class Report(Protocol):
    """Tell whoever listens that something happened; ``fields`` are JSON values."""

    def __call__(self, event: str, /, **fields: object) -> None: ...


def silent(_event: str, /, **_fields: object) -> None:
    """A ``Report`` to nobody."""


class Reporter:
    """Writes to standard output, at once, also into a pipe."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._lock = threading.Lock()

    def say(self, text: str, end: str = "\n") -> None:
        """For people only."""
        if not self.as_json:
            self._write(text + end)

    def event(self, event: str, /, **fields: object) -> None:
        """For programs only. A ``Report``."""
        if self.as_json:
            line = {"event": event, "time": round(time.time(), 3), **fields}
            self._write(json.dumps(line, ensure_ascii=False) + "\n")

    def _write(self, text: str) -> None:
        with self._lock:
            sys.stdout.write(text)
            sys.stdout.flush()
