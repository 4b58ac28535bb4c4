"""The wheel: the same bytes from two builds in different places, and everything in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from tool_scripts import TOOLS, load_tool

build_wheel = load_tool("build_wheel")
ROOT = TOOLS.parent


def copy_sources(target: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_builds_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other directory, other times and modes of files, other umask."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    first = build_wheel.build(copy_sources(tmp_path / "a"), tmp_path / "out1")
    other = copy_sources(tmp_path / "another" / "place")
    for path in other.rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            os.utime(path, (1_600_000_000, 1_600_000_000))
    before = os.umask(0o077)
    try:
        second = build_wheel.build(other, tmp_path / "out2")
    finally:
        os.umask(before)
    assert first.name == second.name
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as two:
        assert {i.filename: i.CRC for i in one.infolist()} == {
            i.filename: i.CRC for i in two.infolist()
        }
        names = one.namelist()
        assert {i.date_time for i in one.infolist()} == {(2023, 11, 14, 22, 13, 20)}
    assert build_wheel.digest(first) == build_wheel.digest(second)
    for needed in (
        "pocket_backend/cli/main.py",
        "pocket_backend/model_repository/generator/1/model.py",
        "pocket_client/gateway/__main__.py",
        "pocketllm/__init__.py",
    ):
        assert needed in names
    assert any(name.startswith("pocket_cpp_core") for name in names)
    assert not [name for name in names if name.startswith(("tests", "build", "cpp_engine"))]


def test_the_time_is_that_of_the_last_commit(tmp_path: Path) -> None:
    assert build_wheel.commit_time(tmp_path) == "315532800", "no repository: a zip's oldest"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run(
        [*git, "commit", "-q", "--allow-empty", "-m", "first"],
        check=True,
        env={**os.environ, "GIT_COMMITTER_DATE": "1700000000 +0000"},
    )
    assert build_wheel.commit_time(tmp_path) == "1700000000"
