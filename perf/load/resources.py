"""What a process and its descendants hold: memory, file descriptors, threads. Linux, /proc."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Resources:
    """Sums over a process tree at one moment, and the shared memory that carries its mark."""

    processes: int
    rss_bytes: int
    """Resident memory without what is shared with files (the model's weights are mapped)."""
    file_descriptors: int
    threads: int
    shm_bytes: int


def read_resources(root: int, shm_mark: str) -> Resources:
    """``root``'s descendants, without itself, and regions of /dev/shm with ``shm_mark`` in their
    names. A process that ends while it is read counts as far as it was read."""
    pids = _descendants(root)
    rss = descriptors = threads = 0
    for pid in pids:
        status = _status(pid)
        rss += 1024 * (status.get("RssAnon", 0) + status.get("RssShmem", 0))
        threads += status.get("Threads", 0)
        try:
            descriptors += sum(1 for _ in (_PROC / str(pid) / "fd").iterdir())
        except OSError:
            continue
    sizes = [_size(path) for path in _SHM.glob(f"*{shm_mark}*")]
    return Resources(len(pids), rss, descriptors, threads, sum(sizes))


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found, pending = [], list(parents.get(root, ()))
    while pending:
        pid = pending.pop()
        found.append(pid)
        pending += parents.get(pid, ())
    return found


def _status(pid: int) -> Mapping[str, int]:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines)
    return {key: int(value.split()[0]) for key, value in pairs if value.split()[:1] and
            value.split()[0].isdigit()}  # fmt: skip


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
