"""What `make run` shows: a real server, one streamed answer, how to ask it yourself."""

from __future__ import annotations

from pocket_backend.cli.examples import examples
from pocket_backend.cli.reporter import Reporter
from pocket_backend.cli.serving import is_terminal, running_server, wait_for_interrupt
from pocket_backend.cli.session import Prompt, connect
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
        reporter.say(f"{bold}assistant{plain}  ", end="")
        turns = [
            {"role": "system", "content": SYSTEM_TURN},
            {"role": "user", "content": prompt},
        ]
        session = connect(server.grpc_address)
        try:
            answer = session.ask(
                Prompt(messages=turns),
                {"max_tokens": max_tokens},
                lambda text, _tokens: reporter.say(text, end=""),
            )
        finally:
            session.close()
        reporter.say(f"\n\n{answer.summary()}\n")
        reporter.event("answer", prompt=prompt, **answer.as_dict())
        if once:
            return 0
        reporter.say(examples(server))
        return wait_for_interrupt(server, policy, reporter=reporter)
