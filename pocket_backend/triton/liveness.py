"""Whether the processes of a server live and make progress: observation and judgement.

Triton's own readiness cannot tell: it stays 200 when a stub is dead, stopped or hung.  So each
process is judged by the kernel's view of it and by how long something has waited for its answer:

    died      it is a zombie, twice in a row
    stopped   by a signal (SIGSTOP), for a second
    hangs     something waits for it for ``stall_seconds``, in which it used next to no CPU and
              hardly ever waited for one
    stuck     something waits for it for ``busy_stall_seconds``, whatever CPU it uses

CPU time tells a long step from a hang: a prefill on a slow machine may take longer than any short
limit, but it computes meanwhile.  On a machine whose processors others hold (or in a container
whose quota is used up) it may get none for seconds: then it is not hung either, and a restart would
cost more of what is scarce.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pocket_backend.triton.shm import region_prefix

SERVER = "tritonserver"
_STUB = b"triton_python_backend_stub"
_TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")
_IDLE_SHARE = 0.01
"""Less CPU than this while something waits: not computing. Answering the supervisor costs less."""


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """Seconds after which a process that something waits for counts as wedged."""

    stall_seconds: float = 4.0
    busy_stall_seconds: float = 60.0
    stopped_seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A process at one moment."""

    state: str
    """The letter in ``/proc/<pid>/stat``; Z is a zombie, T stopped."""
    cpu_seconds: float
    queued: bool = False
    """Whether one of its threads runs or waits for a processor."""


def sample_process(pid: int, *, threads: bool = False) -> Sample | None:
    """None: there is no such process.

    ``threads``: look at each thread for ``queued``, which takes a file per thread.
    """
    try:
        fields = _stat(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    cpu_seconds = (int(fields[11]) + int(fields[12])) * _TICK_SECONDS
    return Sample(fields[0].decode(), cpu_seconds, threads and _wants_processor(pid))


def _stat(file: Path) -> list[bytes]:
    """What follows the name, which may hold anything, in a file of ``proc_pid_stat(5)``."""
    return file.read_bytes().rpartition(b")")[2].split()


def _wants_processor(pid: int) -> bool:
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            if _stat(file)[0] == b"R":
                return True
        except OSError:  # the thread has ended
            continue
    return False


def find_processes(server_id: str) -> dict[str, int]:
    """The server's process ids: ``tritonserver``, and each stub under its model's name.

    While a model is reloaded it has two stubs; the newer counts. Zombies have no command line, so
    they are not found.
    """
    prefix = region_prefix(server_id).encode()
    found: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if not any(prefix in word for word in words[1:]):
            continue
        name = SERVER
        if words[0].endswith(_STUB):
            name = Path(os.fsdecode(words[1])).parent.parent.name  # <name>/<version>/model.py
        found[name] = max(int(entry.name), found.get(name, 0))
    return found


class Watch:
    """Judges one process. Not thread-safe; time is passed in."""

    def __init__(self, pid: int, policy: LivenessPolicy) -> None:
        self.pid = pid
        self._policy = policy
        self._dead_looks = 0
        self._stopped_since: float | None = None
        self._history: deque[tuple[float, float, bool]] = deque()

    def observe(self, now: float, sample: Sample, waiting_seconds: float) -> str | None:
        """What is wrong, or None. ``waiting_seconds``: how long something has waited for it."""
        policy = self._policy
        self._dead_looks = self._dead_looks + 1 if sample.state in "ZX" else 0
        if self._dead_looks:
            # A stub that Triton ends in order is a zombie for a moment.
            return "died" if self._dead_looks > 1 else None
        if sample.state in "Tt":
            self._stopped_since = now if self._stopped_since is None else self._stopped_since
            if now - self._stopped_since >= policy.stopped_seconds:
                return "stopped by a signal"
        else:
            self._stopped_since = None
        idle = self._idle_for(now, sample)
        if waiting_seconds >= policy.busy_stall_seconds:
            return f"stuck: no progress for {waiting_seconds:.0f} s although work waits"
        if waiting_seconds >= policy.stall_seconds and idle:
            return f"hangs: no progress for {waiting_seconds:.1f} s, and it computes nothing"
        return None

    def _idle_for(self, now: float, sample: Sample) -> bool:
        """Whether it neither used CPU in the last ``stall_seconds`` nor mostly waited for one."""
        span = self._policy.stall_seconds
        self._history.append((now, sample.cpu_seconds, sample.queued))
        while len(self._history) > 1 and self._history[1][0] <= now - span:
            self._history.popleft()
        then, used, _ = self._history[0]
        starved = sum(queued for *_, queued in self._history) * 2 > len(self._history)
        computed = sample.cpu_seconds - used >= _IDLE_SHARE * (now - then)
        return now - then >= span and not computed and not starved


class Canary:
    """Asks a question again and again on a thread of its own, and knows how long an answer takes.

    An error is an answer for ``waiting_seconds`` (somebody is there), but ``failures`` counts those
    in a row.
    """

    def __init__(self, name: str, ask: Callable[[], object], period: float) -> None:
        self.name = name
        self.failures = 0
        self.last_error = ""
        self._ask = ask
        self._period = period
        self._asked_at: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"canary-{name}", daemon=True)
        self._thread.start()

    def waiting_seconds(self, now: float) -> float:
        """Age of the question that is open (``time.monotonic``), or 0."""
        asked = self._asked_at
        return 0.0 if asked is None else max(0.0, now - asked)

    def close(self) -> None:
        """Ask no more. Does not wait for an answer that may never come."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._period):
            self._asked_at = time.monotonic()
            try:
                self._ask()
            except OSError as error:
                self.last_error = str(error)
                self.failures += 1
            else:
                self.failures = 0
            finally:
                self._asked_at = None
