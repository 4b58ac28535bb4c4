"""What the commands print: text at once, a waiting line on a terminal, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import TracebackType
from typing import IO, Self

_FRAMES = "|/-\\"
_FRAME_SECONDS = 0.1
_CLEAR_LINE = "\r\033[K"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def write(text: str) -> None:
    """A piece of an answer, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """For people only: never part of what a pipe receives."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """One line, so that a stream of answers is JSON lines."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def decorated(stream: IO[str]) -> bool:
    """Whether control sequences make sense there."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def amount(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    value = float(count)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError


class Waiting:
    """``with Waiting("loading x"):`` a line on stderr with the seconds so far, gone at the end.

    Says nothing where stderr is no terminal.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._spin, name="waiting", daemon=True)
        self._shown = decorated(sys.stderr)
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._shown:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._ended.set()
            self._thread.join()
            self._say(_CLEAR_LINE)

    def _spin(self) -> None:
        frame = 0
        while True:
            sign = _FRAMES[frame % len(_FRAMES)]
            self._say(f"{_CLEAR_LINE}{sign} {self._what} ... {self.seconds:.1f} s")
            if self._ended.wait(_FRAME_SECONDS):
                return
            frame += 1

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
