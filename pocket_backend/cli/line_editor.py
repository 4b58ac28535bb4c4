"""Reading messages of one or more lines, with history and completion where there is a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Self

BLOCK = '"""'
_HISTORY_LINES = 1000
_CONTINUED = "... "


def history_file() -> Path:
    """Where typed lines are kept: below ``XDG_STATE_HOME`` (``~/.local/state``)."""
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base or Path.home() / ".local" / "state") / "pocketllm" / "chat_history"


class LineEditor:
    """``read`` gives one message at a time.

    A line that ends with a backslash goes on in the next one; three double quotes begin and end a
    block. On a terminal, lines are edited by GNU readline, kept in ``history_file()`` (readable by
    its owner only), and ``completions`` are offered at Tab. Elsewhere lines are just read.
    """

    def __init__(self, completions: Sequence[str], prompt: str = "> ") -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._prompt = prompt
        self._completions = completions
        self._readline = _load_readline() if self.interactive else None

    def __enter__(self) -> Self:
        readline = self._readline
        if readline is not None:
            readline.set_completer(self._complete)
            readline.set_completer_delims("\n")
            readline.parse_and_bind("tab: complete")
            readline.set_history_length(_HISTORY_LINES)
            with contextlib.suppress(OSError):  # none yet, or unreadable: begin a new one
                readline.read_history_file(history_file())
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is None:
            return
        path = history_file()
        with contextlib.suppress(OSError):  # a home that cannot be written is no reason to fail
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._readline.write_history_file(path)

    def read(self) -> str | None:
        """The next message; None at the end of the input.

        Raises:
            KeyboardInterrupt: Ctrl-C; what was typed is dropped.
        """
        line = self._line(self._prompt)
        if line is None:
            return None
        if line.startswith(BLOCK):
            return self._block(line.removeprefix(BLOCK))
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(_CONTINUED)
        return "\n".join([*lines, line or ""])

    def _block(self, line: str | None) -> str:
        lines = []
        while line is not None:
            before, found, _ = line.partition(BLOCK)
            lines.append(before)
            if found:
                break
            line = self._line(_CONTINUED)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self.interactive:
            try:
                return input(prompt)
            except EOFError:
                return None
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None

    def _complete(self, text: str, state: int) -> str | None:
        found = [item for item in self._completions if item.startswith(text)] if text else []
        return found[state] if state < len(found) else None


def _load_readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # a Python built without it: lines can be typed, not edited
        return None
    return readline
