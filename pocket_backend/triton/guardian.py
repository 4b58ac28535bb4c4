"""The process between a launcher and its Triton server; it outlives neither.

    launcher ── pipe on stdin ──> guardian ── child, own process group ──> tritonserver ──> stubs

On ``stop <seconds>`` the guardian ends the server with SIGTERM and a wait of that long, or at once
with SIGKILL for 0. When the pipe closes, which the kernel also does when the launcher is killed, it
waits a few seconds. It is a subreaper, so stubs
that lose their server become its children and can be waited for. On its way out nothing of the
server is left: no process, no shared memory, and no runtime directory, except when the server ended
by itself: then the launcher still wants to read the log.

Runs as ``python -m pocket_backend.triton.guardian`` with one line of JSON (``GuardianSpec``) on
stdin.  Exit status: the server's, or 128 + signal.  Standard library only: it must start quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pocket_backend.triton.shm import ServerLock, kill_stubs, remove_regions

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINE_LIMIT = 1 << 20
_ORPHAN_TIMEOUT = 5.0
"""Seconds that a server without a launcher gets to end by itself."""
_STOP = b"stop "


@dataclass(frozen=True, slots=True)
class GuardianSpec:
    """What to run. ``environment`` replaces the guardian's own; times are seconds."""

    server_id: str
    argv: list[str]
    environment: dict[str, str]
    log_file: str
    runtime_dir: str

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def stop_command(seconds: float) -> bytes:
    """What a launcher writes to have the server ended within ``seconds``."""
    return b"%s%.3f\n" % (_STOP, max(0.0, seconds))


def main() -> int:
    # A terminal's Ctrl-C is the launcher's to handle; ours is the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    line = _read_line(0)
    if line is None:
        return 0  # the launcher died before it told us anything
    spec = GuardianSpec(**json.loads(line))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    lock = ServerLock(spec.server_id)
    log_wanted = False
    try:
        status, log_wanted = _run(spec)
    finally:
        kill_stubs(spec.server_id)
        remove_regions(spec.server_id)
        lock.release()
        if not log_wanted:
            shutil.rmtree(spec.runtime_dir, ignore_errors=True)
    return status


def _run(spec: GuardianSpec) -> tuple[int, bool]:
    """Returns (exit status, whether the server ended by itself)."""
    with Path(spec.log_file).open("ab", buffering=0) as log:
        server = subprocess.Popen(
            spec.argv,
            env=spec.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
            # Safe: this process has one thread.  Without a guardian the server must not stay.
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    terminate = _TerminationFlag()
    pidfd = os.pidfd_open(server.pid)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(terminate.read_fd, select.POLLIN)
    try:
        ready = {fd for fd, _ in poller.poll()}
        by_itself = pidfd in ready
        if not by_itself:
            command = os.read(0, 64) if 0 in ready else b""
            told = command.startswith(_STOP)
            timeout = float(command.removeprefix(_STOP)) if told else _ORPHAN_TIMEOUT
            if timeout > 0:
                _stop(server.pid, pidfd, timeout, watch_pipe=told)
    finally:
        status = _reap_group(server.pid)
        server.returncode = status
        os.close(pidfd)
    return status, by_itself


def _stop(pid: int, pidfd: int, timeout: float, *, watch_pipe: bool) -> None:
    """SIGTERM, then wait for the end, the timeout, or a launcher that cannot wait any more."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    if watch_pipe:
        poller.register(0, select.POLLIN | select.POLLHUP)
    poller.poll(timeout * 1000)


def _reap_group(pid: int) -> int:
    """Kill what is left of the server's process group and wait for all children."""
    status = 0
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        try:
            child, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if child == 0:
            time.sleep(0.01)
        elif child == pid:
            value = os.waitstatus_to_exitcode(code)
            status = value if value >= 0 else 128 - value
    return status


class _TerminationFlag:
    """Turns SIGTERM into something ``poll`` can wait for."""

    def __init__(self) -> None:
        self.read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_fd)
        signal.signal(signal.SIGTERM, lambda *_: None)


def _read_line(fd: int) -> bytes | None:
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(fd, 65536)
        if not piece or len(data) > _LINE_LIMIT:
            return None
        data += piece
    return data


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    sys.exit(main())
