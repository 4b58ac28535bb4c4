"""A container's CPU quota, which the affinity mask does not show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pocket_backend.executors.cpu_quota import cpu_quota, quota_threads


@pytest.mark.parametrize(
    ("text", "quota", "threads"),
    [
        ("150000 100000\n", 1.5, 1),
        ("50000 100000\n", 0.5, 1),
        ("390000 100000\n", 3.9, 3),
        ("400000 100000\n", 4.0, 0),
        ("max 100000\n", None, 0),
        ("", None, 0),
        ("1 2 3", None, 0),
    ],
)
def test_threads_within_a_quota(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    quota: float | None,
    threads: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert cpu_quota(file) == quota
    assert quota_threads(file) == threads


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "nowhere") is None
    assert quota_threads(tmp_path / "nowhere") == 0
