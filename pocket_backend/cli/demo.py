"""What `make run` shows: a real server, one streamed answer, how to ask it yourself."""

from __future__ import annotations

from pocket_backend.cli.console import write
from pocket_backend.cli.examples import examples
from pocket_backend.cli.serving import is_terminal, running_server, say, wait_for_interrupt
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
) -> int:
    """Start, ask ``prompt``, print the answer as it comes; then serve on unless ``once``."""
    with running_server(options) as server:
        bold, plain = ("\033[1m", "\033[0m") if is_terminal() else ("", "")
        say(f"\n{bold}user{plain}       {prompt}")
        print(f"{bold}assistant{plain}  ", end="", flush=True)
        turns = [
            {"role": "system", "content": SYSTEM_TURN},
            {"role": "user", "content": prompt},
        ]
        session = connect(server.grpc_address)
        try:
            answer = session.ask(
                Prompt(messages=turns),
                {"max_tokens": max_tokens},
                lambda text, _tokens: write(text),
            )
        finally:
            session.close()
        say(f"\n\n{answer.summary()}\n")
        if once:
            return 0
        say(examples(server))
        return wait_for_interrupt(server, policy)
