"""What `make run` shows: a real server, one streamed answer, how to ask it yourself."""

from __future__ import annotations

import sys

from pocket_backend.cli.chat_client import stream_chat
from pocket_backend.cli.examples import examples
from pocket_backend.cli.serving import is_terminal, running_server, say, wait_for_interrupt
from pocket_backend.triton.launcher import ServerOptions

SYSTEM_TURN = "You are a helpful assistant."


def demo(options: ServerOptions, *, prompt: str, max_tokens: int, once: bool) -> int:
    """Start, ask ``prompt``, print the answer as it comes; then serve on unless ``once``."""
    with running_server(options) as server:
        bold, plain = ("\033[1m", "\033[0m") if is_terminal() else ("", "")
        say(f"\n{bold}user{plain}       {prompt}")
        print(f"{bold}assistant{plain}  ", end="", flush=True)
        answer = stream_chat(
            server.grpc_address,
            [{"role": "system", "content": SYSTEM_TURN}, {"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            on_text=_show,
        )
        say(
            f"\n\n{answer.prompt_tokens} prompt tokens, {answer.output_tokens} new ones "
            f"({answer.finish_reason}); first token after {answer.ttft_seconds * 1000:.0f} ms, "
            f"then {answer.tokens_per_second:.0f} tokens/s\n"
        )
        if once:
            return 0
        say(examples(server))
        return wait_for_interrupt(server)


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
