"""A private line from the supervisor to the generator that does not pass through Triton.

    supervisor ── Unix socket in the server's runtime directory (mode 0700) ──> generator's stub

Two messages go over it: how is the engine, and stop admitting requests.  It works while Triton is
busy or wedged, and its answers come from a thread that takes no lock for long, so silence means
that the stub itself stands still.  The directory's mode is the access control: whoever may enter it
is the user that runs the server.

One connection per message (``SOCK_SEQPACKET``), JSON both ways:

    {"status": true}        -> {"state", "open_requests", "steps", "seconds_since_progress"}
    {"drain_seconds": 5.0}  -> the same, after admission has stopped
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pocket_backend.observability.logging import get_logger, log_event

if TYPE_CHECKING:
    from pocket_backend.engine.unified import UnifiedEngine

VARIABLE = "POCKETLLM_LIFELINE"
"""Environment variable of the stubs that holds the socket's path; unset without a launcher."""
FILE_NAME = "lifeline"

_log = get_logger("triton.lifeline")
_MAX_MESSAGE = 4096
_CLIENT_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the supervisor judges. ``state`` as in ``HealthStatus.status``; times in seconds."""

    state: str
    open_requests: int
    steps: int
    seconds_since_progress: float

    @property
    def waiting_seconds(self) -> float:
        """How long work has been waiting for a step to end; 0 without work."""
        return self.seconds_since_progress if self.open_requests else 0.0


class LifelineListener:
    """The generator's end: one thread that answers one message at a time."""

    @classmethod
    def from_environment(cls, engine: UnifiedEngine, environ: Mapping[str, str]) -> Self | None:
        """A running listener, or None where no launcher asked for one."""
        path = environ.get(VARIABLE)
        return cls(engine, Path(path)) if path else None

    def __init__(self, engine: UnifiedEngine, path: Path) -> None:
        """Listen at ``path``.

        While a model is reloaded two generators overlap: the newer takes the name over, and nobody
        removes it (the launcher removes the directory).
        """
        self._engine = engine
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _short_path(path.parent) as directory:
            temporary = directory / f"{path.name}.{os.getpid()}"
            temporary.unlink(missing_ok=True)
            self._socket.bind(str(temporary))
            self._socket.listen(8)
            temporary.rename(directory / path.name)
        self._thread = threading.Thread(target=self._run, name="pocket-lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; returns when no message is being answered. Idempotent."""
        if self._thread.is_alive():
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                try:
                    connection.settimeout(_CLIENT_TIMEOUT)
                    answer = self._answer(connection.recv(_MAX_MESSAGE))
                    connection.send(json.dumps(asdict(answer)).encode())
                except (OSError, ValueError) as error:
                    log_event(_log, logging.WARNING, "message not answered", reason=str(error))

    def _answer(self, message: bytes) -> EngineStatus:
        request = json.loads(message)
        if isinstance(request, dict) and "drain_seconds" in request:
            self._engine.stop_admitting(float(request["drain_seconds"]))
        health = self._engine.health()
        details = health.details
        return EngineStatus(
            state=health.status,
            open_requests=int(str(details["open_requests"])),
            steps=int(str(details["steps"])),
            seconds_since_progress=float(str(details["seconds_since_progress"])),
        )


class Lifeline:
    """The supervisor's end. Any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def status(self, timeout: float) -> EngineStatus:
        """The engine's status now.

        Raises:
            OSError: no generator, or none that answers within ``timeout`` seconds.
        """
        return self._ask({"status": True}, timeout)

    def drain(self, seconds: float, timeout: float) -> EngineStatus:
        """Stop admitting; what is still open after ``seconds`` ends with an error.

        A later call may shorten the time, never lengthen it.

        Raises:
            OSError: as ``status``.
        """
        return self._ask({"drain_seconds": seconds}, timeout)

    def _ask(self, message: Mapping[str, object], timeout: float) -> EngineStatus:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout)
            with _short_path(self._path.parent) as directory:
                connection.connect(str(directory / self._path.name))
            connection.send(json.dumps(message).encode())
            answer = connection.recv(_MAX_MESSAGE)
        if not answer:
            raise ConnectionResetError("the generator ended before it answered")
        return EngineStatus(**json.loads(answer))


@contextlib.contextmanager
def _short_path(directory: Path) -> Iterator[Path]:
    """Another name of ``directory``: addresses of Unix sockets end at 107 bytes."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
