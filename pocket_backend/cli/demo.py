"""What `make run` shows: a real server, one streamed answer, how to ask it yourself."""

from __future__ import annotations

from pocket_backend.cli.examples import examples
from pocket_backend.cli.reporter import Reporter
from pocket_backend.cli.serving import is_terminal, running_server, wait_for_interrupt
from pocket_backend.cli.session import Answer, Prompt, Session, connect
from pocket_backend.triton.launcher import ServerOptions
from pocket_backend.triton.supervisor import SupervisionPolicy

SYSTEM_TURN = "You are a helpful assistant."


def demo(
    options: ServerOptions,
    *,
    prompt: str,
    max_tokens: int,
    once: bool,
    policy: SupervisionPolicy | None = None,
    reporter: Reporter | None = None,
) -> int:
    """Start, ask ``prompt``, print the answer as it comes; then serve on unless ``once``."""
    reporter = reporter or Reporter()
    with running_server(options, reporter) as server:
        bold, plain = ("\033[1m", "\033[0m") if is_terminal() else ("", "")
        reporter.say(f"\n{bold}user{plain}       {prompt}")
        session = connect(server.grpc_address)
        try:
            answer, chat = _ask(session, prompt, max_tokens, reporter, f"{bold}assistant{plain}  ")
        finally:
            session.close()
        reporter.say(f"\n\n{answer.summary()}\n")
        reporter.event("answer", prompt=prompt, **answer.as_dict())
        if once:
            return 0
        reporter.say(examples(server, chat=chat))
        return wait_for_interrupt(server, policy, reporter=reporter)


def _ask(
    session: Session, prompt: str, max_tokens: int, reporter: Reporter, heading: str
) -> tuple[Answer, bool]:
    """The answer in the fullest form that the model takes, and whether that was a conversation.

    Some templates refuse a system turn, and a base model has none.
    """
    from pocket_client import InvalidRequestError

    question = {"role": "user", "content": prompt}
    forms = [
        (Prompt(messages=[{"role": "system", "content": SYSTEM_TURN}, question]), heading),
        (Prompt(messages=[question]), heading),
        (Prompt(text=prompt), "(this model has no chat template; it continues the text)\n"),
    ]
    for form, label in forms:
        said = False

        def on_piece(text: str, _tokens: int, label: str = label) -> None:
            nonlocal said
            reporter.say(text if said else label + text, end="")
            said = True

        try:
            answer = session.ask(form, {"max_tokens": max_tokens}, on_piece)
        except InvalidRequestError as error:
            if form.messages is None or not (error.field or "").startswith("messages"):
                raise
        else:
            return answer, form.messages is not None
    raise AssertionError("the last form returns or raises")
