"""How many processors a container lets this process use, which its affinity mask does not say."""

from __future__ import annotations

import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def cpu_quota(path: Path = CPU_MAX) -> float | None:
    """Processors that a control group (version 2) may use; None: no limit, or not known."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() else None


def quota_threads(path: Path = CPU_MAX) -> int:
    """Compute threads that a quota below the affinity mask leaves; 0: nothing of the kind.

    Rounded down: threads that wait for each other stand still together when the group's time is
    used up, so one thread too many costs all of them.
    """
    quota = cpu_quota(path)
    if quota is None or quota >= len(os.sched_getaffinity(0)):
        return 0
    return max(1, int(quota))
