"""Sessions of the command line that answer from a script."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from pocket_backend.cli import session as sessions
from pocket_backend.cli.session import Answer, OnPiece, Prompt

Step = str | BaseException


@dataclass
class ScriptedSession:
    """``script`` gives the pieces of the answer to the n-th request; an exception is raised."""

    script: Callable[[int], Sequence[Step]] = lambda _n: ["Hello", " there"]
    name: str = "scripted"
    asked: list[tuple[Prompt, Mapping[str, object]]] = field(default_factory=list)
    closed: bool = False

    def ask(self, prompt: Prompt, sampling: Mapping[str, object], on_piece: OnPiece) -> Answer:
        self.asked.append((prompt, sampling))
        texts = []
        for step in self.script(len(self.asked) - 1):
            if isinstance(step, BaseException):
                raise step
            texts.append(step)
            on_piece(step, 1)
        return Answer("".join(texts), "stop", 7, 3, len(texts), 0.25, 0.5)

    def tokenize(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def close(self) -> None:
        self.closed = True


def use_session(monkeypatch: pytest.MonkeyPatch, session: ScriptedSession, module: object) -> None:
    """Let ``module``'s ``open_session`` give ``session``, with the options checked as ever."""

    @contextmanager
    def opened(
        options: argparse.Namespace, _step_hooks: Sequence[object] = ()
    ) -> Iterator[ScriptedSession]:
        sessions.check_source(options)
        try:
            yield session
        finally:
            session.close()

    monkeypatch.setattr(module, "open_session", opened)
