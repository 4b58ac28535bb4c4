"""What machine and commit a figure belongs to, and whether anybody else was using the CPU.

Shared by every benchmark.  Linux only: all facts come from ``/proc`` and ``git``.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

BUSY_LIMIT = 0.05
"""Largest share of the machine that foreign work may take during a measurement.  The kernel's two
ways of counting time (ticks in /proc/stat, precise run time per process) differ by 1 to 2 %."""
COUNTING_ERROR_SECONDS = 0.03
"""Three ticks of 10 ms: what rounding alone may report on a measurement of any length."""

_ROOT = Path(__file__).resolve().parent.parent
_USEFUL_FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx")


class MachineBusyError(RuntimeError):
    """Other processes used the CPU during a measurement: its figure would not be comparable."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts printed under every table."""

    cpu: str
    cores: int
    flags: tuple[str, ...]
    memory_bytes: int
    kernel: str
    commit: str

    def summary(self) -> str:
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        return (
            f"{self.cpu}, {self.cores} cores, {' '.join(self.flags)}, {memory}, "
            f"Linux {self.kernel}, commit {self.commit}"
        )


def describe_machine() -> Machine:
    """Read the facts of this machine and checkout."""
    cpuinfo = _cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    have = cpuinfo.get("flags", "").split()
    return Machine(
        cpu=_cpu_name(cpuinfo),
        cores=os.cpu_count() or 1,
        flags=tuple(f for f in _USEFUL_FLAGS if any(h == f or h.startswith(f + "_") for h in have)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release().split("-")[0],
        commit=git_commit(),
    )


def _cpuinfo(text: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _cpu_name(cpuinfo: dict[str, str]) -> str:
    """The model name, with family and model: virtual machines often hide the marketing name."""
    family, model = cpuinfo.get("cpu family", "?"), cpuinfo.get("model", "?")
    return f"{cpuinfo.get('model name', 'unknown CPU')} (family {family}, model {model})"


def git_commit() -> str:
    """Short hash of HEAD, with ``+changes`` when tracked files of the product differ from it."""
    head = _git("rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    paths = ("pocket_backend", "cpp_engine", "perf", "pyproject.toml")
    return head + ("+changes" if _git("status", "--porcelain", "-uno", "--", *paths) else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Seconds since boot: wall clock, and CPU time of the whole machine and of the measured one."""

    wall: float
    busy: float
    own: float


@dataclass(frozen=True, slots=True)
class CpuUse:
    """What happened between two samples."""

    wall: float
    cores: int
    own_seconds: float
    foreign_seconds: float
    """CPU time of everything but the measured work, time stolen by other machines included."""

    @property
    def foreign_share(self) -> float:
        """Foreign CPU time over (wall x cores): 0 is a quiet machine."""
        return self.foreign_seconds / (self.wall * self.cores)

    def quiet(self, limit: float = BUSY_LIMIT) -> bool:
        return self.foreign_seconds <= limit * self.wall * self.cores + COUNTING_ERROR_SECONDS


def cpu_use(before: CpuSample, after: CpuSample, cores: int) -> CpuUse:
    """The difference of two samples of a machine with ``cores`` CPUs."""
    wall = max(after.wall - before.wall, 1e-9)
    own = after.own - before.own
    return CpuUse(wall, cores, own, max(0.0, (after.busy - before.busy) - own))


def take_sample(pids: tuple[int, ...]) -> CpuSample:
    """CPU time now; ``pids`` and their descendants are the measured work."""
    return CpuSample(time.monotonic(), _machine_busy_seconds(), _tree_seconds(pids))


def _machine_busy_seconds() -> float:
    """All CPUs: user, nice, system, interrupts, and time stolen by other virtual machines."""
    first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _tree_seconds(roots: tuple[int, ...]) -> float:
    """CPU time of the processes ``roots`` and their descendants, ended and awaited ones too."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for entry in os.listdir("/proc"):  # noqa: PTH208  (names only; Path objects cost CPU here)
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:  # noqa: PTH123
                # The command in parentheses may hold spaces; fields are counted after it.
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(entry)
        parents[pid] = int(fields[1])
        seconds[pid] = sum(map(int, fields[11:15])) / tick

    def is_own(pid: int) -> bool:
        while pid > 1:
            if pid in roots:
                return True
            pid = parents.get(pid, 0)
        return False

    return sum(used for pid, used in seconds.items() if is_own(pid))


@dataclass(slots=True)
class BusyMonitor:
    """Watches measurements; keeps the use of each and decides whether the run may be published.

    Not thread-safe: one measurement at a time.  ``sample`` is replaced in tests.
    """

    limit: float = BUSY_LIMIT
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    sample: Callable[[tuple[int, ...]], CpuSample] = take_sample
    uses: list[CpuUse] = field(default_factory=list)

    @contextmanager
    def measuring(self, *pids: int) -> Iterator[None]:
        """Sample around the block; the trees of ``pids`` (default: this process) are our own.

        Nothing is recorded when the block raises.
        """
        roots = pids or (os.getpid(),)
        before = self.sample(roots)
        yield
        self.uses.append(cpu_use(before, self.sample(roots), self.cores))

    @property
    def last(self) -> CpuUse:
        return self.uses[-1]

    def last_was_quiet(self) -> bool:
        return self.last.quiet(self.limit)

    def require_quiet(self, seconds: float = 1.0) -> None:
        """Look at the machine before starting.

        Raises:
            MachineBusyError: something else is using it; the message says how much.
        """
        with self.measuring():
            time.sleep(seconds)
        if not self.last_was_quiet():
            raise MachineBusyError(self.complaint())

    def complaint(self) -> str:
        return (
            f"other processes use {self.last.foreign_share:.0%} of the CPU (limit "
            f"{self.limit:.0%}): wait until the machine is idle, or pass --allow-busy for figures "
            "that are not for publication"
        )
