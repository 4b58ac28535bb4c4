"""A server in the foreground: start-up messages, signals, a clean stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from pocket_backend.api.errors import ConfigurationError
from pocket_backend.cli.examples import examples
from pocket_backend.triton.launcher import ServerOptions, TritonServer

_WATCH_SECONDS = 0.5


def serve(options: ServerOptions) -> int:
    """Serve until Ctrl-C or SIGTERM; 1 if the server ends by itself."""
    with running_server(options) as server:
        say(examples(server))
        return wait_for_interrupt(server)


@contextlib.contextmanager
def running_server(options: ServerOptions) -> Iterator[TritonServer]:
    """Start, yield a server that answers, and stop it whatever happens.

    SIGTERM raises KeyboardInterrupt like Ctrl-C. The stop gives open streams some seconds; a second
    Ctrl-C ends it at once, as cleanly.
    """
    previous = signal.signal(signal.SIGTERM, _raise_interrupt)
    server = TritonServer(options)
    try:
        started = time.monotonic()
        say(f"starting Triton with {Path(options.model).name} ...")
        server.start()
        say(
            f"ready in {time.monotonic() - started:.1f} s: HTTP {server.http_url}, "
            f"gRPC {server.grpc_address}, metrics {server.metrics_url}"
        )
        yield server
    finally:
        server.stop()
        signal.signal(signal.SIGTERM, previous)


def wait_for_interrupt(server: TritonServer) -> int:
    """Sleep until a signal; notice a server that ends by itself.

    Raises:
        ConfigurationError: the server ended.
    """
    try:
        say("serving; Ctrl-C stops")
        while server.running:
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        say("\nstopping (again Ctrl-C: at once) ...")
        return 0
    raise ConfigurationError(f"the server ended by itself; its log says:\n{server.failure_lines()}")


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


def _raise_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("NO_COLOR") is None
