"""Shared memory of one server: a name prefix of its own, a lock that says who lives, and cleaning.

Triton's Python backend creates regions in ``/dev/shm`` whose names start with a configurable prefix
and leaves them behind when it is killed.  Every server that we start uses the prefix
``pocketllm-<id>-`` and its guardian holds an exclusive ``flock`` on ``pocketllm-<id>.lock``.  The
kernel drops the lock with the process, in every pid namespace that shares ``/dev/shm``, so a prefix
whose lock can be taken belongs to nobody and may be removed; nothing else is ever touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
from pathlib import Path

from pocket_backend.api.errors import ConfigurationError

SHM_DIR = Path("/dev/shm")  # noqa: S108  (the kernel's shared-memory mount, not a temporary file)
MIN_FREE_BYTES = 32 << 20
"""Three stubs at 1 MiB each, plus growth for prompts and responses in flight."""

_LOCK_NAME = re.compile(r"pocketllm-([0-9a-f]{12})\.lock")


def new_server_id() -> str:
    return secrets.token_hex(6)


def region_prefix(server_id: str) -> str:
    return f"pocketllm-{server_id}-"


def check_free_space(directory: Path = SHM_DIR, needed: int = MIN_FREE_BYTES) -> None:
    """Raises ConfigurationError when ``directory`` has less than ``needed`` bytes left."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise ConfigurationError(f"{directory} is not usable: {error.strerror}") from None
    if free < needed:
        raise ConfigurationError(
            f"{directory} has {free >> 20} MiB free but Triton needs {needed >> 20} MiB: free "
            "some, or give the container more (docker run --shm-size=1g)"
        )


class ServerLock:
    """Holds the lock of one server id; the regions under its prefix live while it is held."""

    def __init__(self, server_id: str, directory: Path = SHM_DIR, *, create: bool = True) -> None:
        """Take the lock; without ``create`` only if its file exists.

        Raises:
            OSError: somebody holds it (EAGAIN), or it is another user's, or there is no such file.
        """
        self.server_id = server_id
        self.path = directory / f"pocketllm-{server_id}.lock"
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def release(self) -> None:
        """Remove the lock's file, then the lock: nobody can take it in between."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def remove_regions(server_id: str, directory: Path = SHM_DIR) -> int:
    """Remove every region of ``server_id``; returns how many there were."""
    prefix = region_prefix(server_id)
    removed = 0
    for path in directory.glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed += 1
    return removed


def clean_stale_servers(directory: Path = SHM_DIR) -> list[str]:
    """Remove what servers of ours that died uncleanly left behind; returns their ids.

    Stub processes that outlived their server are recognised by the region prefix on their command
    line and killed first.
    """
    stale = []
    for path in directory.glob("pocketllm-*.lock"):
        match = _LOCK_NAME.fullmatch(path.name)
        if not match:
            continue
        try:
            lock = ServerLock(match[1], directory, create=False)
        except OSError:
            continue  # alive, another user's, or cleaned by somebody else just now
        try:
            kill_stubs(match[1])
            remove_regions(match[1], directory)
            stale.append(match[1])
        finally:
            lock.release()
    return stale


def kill_stubs(server_id: str) -> None:
    """Kill stub processes whose command line names this server's region prefix."""
    prefix = region_prefix(server_id).encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            is_stub = words[0].endswith(b"triton_python_backend_stub")
            if is_stub and any(word.startswith((prefix, b"/" + prefix)) for word in words):
                os.kill(int(entry.name), signal.SIGKILL)
