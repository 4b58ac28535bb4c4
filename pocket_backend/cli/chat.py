"""`pocketllm chat`: a conversation in the terminal, or one message a line from a pipe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pocket_backend.api import InvalidRequestError
from pocket_backend.cli import console
from pocket_backend.cli.conversation import Conversation
from pocket_backend.cli.exit_codes import OK, UNAVAILABLE, status_of
from pocket_backend.cli.line_editor import LineEditor
from pocket_backend.cli.options import (
    Commands,
    add_json_option,
    add_sampling_options,
    add_source_options,
    sampling_of,
)
from pocket_backend.cli.session import Answer, Prompt, Session, open_session

_TEMPERATURE = 0.7
_DESCRIPTION = """\
Talk with a model, in this process or on a running server.

A line that ends with a backslash goes on in the next one; three double quotes begin and end a text
of several lines. Ctrl-C stops an answer, Ctrl-D ends the chat. Without a terminal, each line of
standard input is a message."""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description=_DESCRIPTION,
        epilog="commands in the chat:\n" + _commands_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-sys", "--system", help="system message")
    parser.add_argument("--load", type=Path, metavar="FILE", help="go on with a /save'd one")
    add_json_option(parser, "each answer on a line")
    add_source_options(parser, positional_model=True)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Until the input ends or /exit.

    Raises:
        PocketLLMError: the session could not begin. Later errors are printed, and the chat goes on.
    """
    sampling = sampling_of(options, temperature=_TEMPERATURE)
    conversation = Conversation() if options.load is None else Conversation.load(options.load)
    if options.system is not None:
        conversation.system = options.system
    with open_session(options) as session, LineEditor(tuple(_COMMANDS)) as editor:
        chat = Chat(session, sampling, conversation, as_json=options.json)
        if editor.interactive and not options.json:
            console.note(f"{session.name}; /help lists commands, Ctrl-D ends\n")
        return _loop(chat, editor)


def _loop(chat: Chat, editor: LineEditor) -> int:
    status = OK
    while not chat.ended:
        try:
            text = editor.read()
        except KeyboardInterrupt:
            if not editor.interactive:
                raise
            console.note("")
            continue
        if text is None:
            if editor.interactive:
                console.note("")
            break
        if text.strip():
            status = max(status, chat.handle(text.strip()))
    return OK if editor.interactive else status  # people saw the error; a script needs the status


class Chat:
    """One conversation with one session; ``handle`` takes what was typed."""

    def __init__(
        self,
        session: Session,
        sampling: Mapping[str, object],
        conversation: Conversation,
        *,
        as_json: bool = False,
    ) -> None:
        self.ended = False
        self.conversation = conversation
        self._session = session
        self._sampling = sampling
        self._as_json = as_json
        self._answers: list[Answer] = []

    def handle(self, text: str) -> int:
        """Run a command or answer a message; returns the status of what went wrong, if it did."""
        try:
            if text.startswith("/"):
                self._command(text)
            else:
                self._message(text)
        except Exception as error:
            status = status_of(error)
            if status is None:
                raise
            self._report(error, status)
            return status
        return OK

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        command = _COMMANDS.get(name)
        if command is None:
            raise InvalidRequestError(f"{name}: no such command; /help lists them")
        command.run(self, rest.strip())

    def _message(self, text: str) -> None:
        self.conversation.ask(text)
        pieces: list[str] = []

        def arrived(piece: str, _tokens: int) -> None:
            pieces.append(piece)
            if not self._as_json:
                console.write(piece)

        try:
            prompt = Prompt(messages=self.conversation.messages())
            answer = self._session.ask(prompt, self._sampling, arrived)
        except KeyboardInterrupt:
            self._settle("".join(pieces))
            console.note("\n(stopped)")
            return
        except Exception:
            self._settle("".join(pieces))
            raise
        self._settle(answer.text)
        self._answers.append(answer)
        if self._as_json:
            console.print_json(answer.as_dict())
        else:
            console.write("\n" if answer.text.endswith("\n") else "\n\n")

    def _settle(self, text: str) -> None:
        """What was said stays said; a question without any answer is taken back."""
        if text:
            self.conversation.answer(text)
        else:
            self.conversation.take_back()

    def _report(self, error: Exception, status: int) -> None:
        if self._as_json:
            console.print_json({"error": {"type": type(error).__name__, "message": str(error)}})
        hint = " (try again)" if status == UNAVAILABLE else ""
        console.note(f"error: {error}{hint}")

    # --- commands ---------------------------------------------------------------------------------

    def help(self, _rest: str) -> None:
        console.note(_commands_help())

    def reset(self, _rest: str) -> None:
        self.conversation.reset()
        console.note("the conversation is empty")

    def system(self, rest: str) -> None:
        if rest:
            self.conversation.system = rest
            self.conversation.reset()
            console.note("system message set; the conversation is empty")
        else:
            console.note(
                self.conversation.system or "no system message; the template's own is used"
            )

    def save(self, rest: str) -> None:
        if not rest:
            raise InvalidRequestError("/save: needs the name of a file")
        self.conversation.save(Path(rest), self._session.name)
        console.note(f"{len(self.conversation.turns)} turns saved in {rest}")

    def stats(self, _rest: str) -> None:
        if not self._answers:
            console.note("no answers yet")
            return
        tokens = sum(answer.output_tokens for answer in self._answers)
        console.note(f"last: {self._answers[-1].summary()}")
        console.note(f"in all: {len(self._answers)} answers, {tokens} tokens")

    def retry(self, _rest: str) -> None:
        text = self.conversation.take_back()
        if text is None:
            raise InvalidRequestError("/retry: nothing was asked yet")
        self._message(text)

    def exit(self, _rest: str) -> None:
        self.ended = True


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Chat, str], None]
    arguments: str
    help: str


_COMMANDS = {
    "/help": _Command(Chat.help, "", "this list"),
    "/reset": _Command(Chat.reset, "", "forget the conversation, keep the system message"),
    "/system": _Command(Chat.system, "[TEXT]", "set the system message (and reset), or show it"),
    "/save": _Command(Chat.save, "FILE", "save as JSON; `chat --load FILE` goes on with it"),
    "/stats": _Command(Chat.stats, "", "tokens and times of the last answer"),
    "/retry": _Command(Chat.retry, "", "ask the last question again"),
    "/exit": _Command(Chat.exit, "", "end (also Ctrl-D)"),
}


def _commands_help() -> str:
    return "\n".join(
        f"  {name + ' ' + command.arguments:16} {command.help}"
        for name, command in _COMMANDS.items()
    )
