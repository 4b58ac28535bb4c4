"""How much memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_memory() -> int | None:
    """Bytes that this process may still take: the machine's and its control groups' limits.

    None when the system does not say (no ``/proc``).
    """
    found = [value for value in (_machine_available(), *_cgroup_available()) if value is not None]
    return min(found) if found else None


def _machine_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> Iterator[int | None]:
    # Version 2, then version 1; inside a container the process's own group is at the root.
    yield _difference("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
    v1 = "/sys/fs/cgroup/memory/memory."
    yield _difference(f"{v1}limit_in_bytes", f"{v1}usage_in_bytes")


def _difference(limit_file: str, usage_file: str) -> int | None:
    try:
        limit = Path(limit_file).read_text(encoding="ascii").strip()
        usage = Path(usage_file).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return max(0, int(limit) - int(usage)) if limit.isdigit() and usage.isdigit() else None
