"""`pocketllm chat`: turns and commands with a scripted model; a real terminal with a real one."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_sessions import ScriptedSession, use_session

from pocket_backend.api import InvalidRequestError, OverloadedError
from pocket_backend.cli import chat
from pocket_backend.cli.chat import Chat
from pocket_backend.cli.conversation import Conversation
from pocket_backend.cli.line_editor import LineEditor
from pocket_backend.cli.main import main

USER, SAID = {"role": "user"}, {"role": "assistant"}


def chat_with(session: ScriptedSession) -> Chat:
    return Chat(session, {}, Conversation())


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_an_answer_becomes_part_of_the_conversation() -> None:
    session = ScriptedSession()
    one = chat_with(session)
    assert one.handle("Hi") == 0
    assert one.handle("And?") == 0
    assert one.conversation.turns == turns("Hi", "Hello there", "And?", "Hello there")


def test_what_was_said_before_an_interruption_stays(capsys: pytest.CaptureFixture[str]) -> None:
    script = (["Hel", KeyboardInterrupt()], [KeyboardInterrupt()])
    one = chat_with(ScriptedSession(lambda n: script[n]))
    one.handle("Hi")
    assert one.conversation.turns == turns("Hi", "Hel")
    one.handle("And?")
    assert one.conversation.turns == turns("Hi", "Hel")
    assert capsys.readouterr().err.count("(stopped)") == 2


def test_a_failed_question_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    one = chat_with(ScriptedSession(lambda _n: [OverloadedError("the queue is full")]))
    assert one.handle("Hi") == 4
    assert one.conversation.turns == []
    assert "error: the queue is full (try again)" in capsys.readouterr().err


def test_a_defect_is_not_hidden() -> None:
    one = chat_with(ScriptedSession(lambda _n: [ZeroDivisionError()]))
    with pytest.raises(ZeroDivisionError):
        one.handle("Hi")


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = ScriptedSession()
    one = chat_with(session)
    one.handle("/stats")
    assert "no answers yet" in capsys.readouterr().err
    assert one.handle("/retry") == 2
    one.handle("/system Be short.")
    one.handle("Hi")
    one.handle("/retry")
    assert session.asked[-1][0].messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
    ]
    one.handle("/stats")
    assert "in all: 2 answers, 4 tokens" in capsys.readouterr().err
    file = tmp_path / "saved.json"
    assert one.handle(f"/save {file}") == 0
    loaded = Conversation.load(file)
    assert (loaded.system, loaded.turns) == ("Be short.", turns("Hi", "Hello there"))
    assert one.handle("/save") == 2
    assert one.handle("/save /nowhere/x") == 2
    assert one.handle("/nonsense") == 2
    one.handle("/reset")
    assert one.conversation.messages() == [{"role": "system", "content": "Be short."}]
    one.handle("/help")
    assert "/system [TEXT]" in capsys.readouterr().err
    one.handle("/exit")
    assert one.ended


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not a conversation"),
        ('{"messages": [1]}', "is not a conversation"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "of an unknown kind"),
    ],
)
def test_files_that_are_no_conversation(content: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(content)
    with pytest.raises(InvalidRequestError, match=problem):
        Conversation.load(file)


def test_messages_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'one\ntwo\\\n more\n"""three\n\n four"""\n"""\nfive\n"""\nlast'
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    editor = LineEditor(())
    read = list(iter(editor.read, None))
    assert read == ["one", "two\n more", "three\n\n four", "five", "last"]


def test_a_pipe_gets_json_lines_and_the_worst_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (["a"], [OverloadedError("full")], ["b"])
    session = ScriptedSession(lambda n: script[n])
    use_session(monkeypatch, session, chat)
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n\n2\n3\n"))
    assert main(["chat", "--json", "-sys", "S"]) == 4
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("text") for line in lines] == ["a", None, "b"]
    assert lines[1]["error"] == {"type": "OverloadedError", "message": "full"}
    assert session.asked[0][1] == {"temperature": 0.7, "max_tokens": 1024}


# --- a real terminal ------------------------------------------------------------------------------

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\x07")


class Terminal:
    """`pocketllm` on a pseudo-terminal."""

    def __init__(self, home: Path, *argv: str) -> None:
        self._fd, other = pty.openpty()
        environment = {
            **os.environ,
            "TERM": "xterm",
            "XDG_STATE_HOME": str(home),
            "INPUTRC": "/dev/null",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pocket_backend.cli.main", *argv],
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: _take_terminal(other),
        )
        os.close(other)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, pattern: str, seconds: float = 60.0) -> None:
        """Read until ``pattern`` shows, and drop everything up to its end."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._fd], [], [], max(0.0, left))
            assert ready, f"{pattern!r} never showed: {self.shown!r}"
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # how Linux says that nobody holds the terminal any more
                data = b""
            assert data, f"ended without {pattern!r}: {self.shown!r}"
            self.shown += _CONTROL.sub("", data.decode(errors="replace"))
        self.shown = self.shown[found.end() :]

    def interrupt(self, pattern: str, presses: int = 30) -> None:
        """Press Ctrl-C, again every two seconds as a person would, until ``pattern`` shows.

        CPython's readline loop looks for signals only when its select() is interrupted: one that
        comes just before the select(), as on a machine short of CPU, waits for the next.
        """
        for last in range(presses, 0, -1):
            self.type("\x03")
            try:
                self.wait_for(pattern, 2.0)
            except AssertionError:
                if last == 1:
                    raise
            else:
                return

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)


def _take_terminal(fd: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path, "chat", "--temp", "0", "-c", "1024", "--max-tokens", "900")
    yield made
    made.close()


def test_a_session_in_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for(r"loading SmolLM2\S+ \(\d+\.\d MiB\)")
    terminal.wait_for("/help lists commands")
    terminal.wait_for("> ")
    terminal.type("Say only:\\\n")
    terminal.wait_for(r"\.\.\. ")
    terminal.type("Hello!\n")
    terminal.wait_for(r"Hello!\n(.|\n)*\S(.|\n)*\n\n> ")
    terminal.type("/sta\t\n")  # Tab completes
    terminal.wait_for(r"/stats\n")
    terminal.wait_for(r"last: \d+ prompt tokens.* tokens/s")
    terminal.wait_for("> ")
    terminal.type("Count from one to one thousand in words.\n")
    terminal.wait_for(r"words\.\n(.|\n)*\w")
    terminal.type("\x03")
    terminal.wait_for(r"\(stopped\)")
    terminal.wait_for("> ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.interrupt("> ")  # Ctrl-C drops it
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0
    history = tmp_path / "pocketllm" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "Count from one to one thousand in words." in history.read_text().splitlines()
