"""A server's log on standard error: all of it, in order, and cut where it lies in memory."""

from __future__ import annotations

import io
from pathlib import Path

from pocket_backend.triton.log_follower import LogFollower


def test_everything_is_copied_once_also_of_a_new_file(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    current: list[Path | None] = [None]
    sink = io.BytesIO()
    with LogFollower(lambda: current[0], sink) as follower:
        follower.copy()
        current[0] = files[0]
        follower.copy()  # it does not exist yet
        files[0].write_bytes(b"a\n")
        follower.copy()
        with files[0].open("ab") as log:
            log.write(b"b\n")
        follower.copy()
        files[1].write_bytes(b"c\n")
        current[0] = files[1]
        follower.copy()
        files[1].unlink()
    assert sink.getvalue() == b"a\nb\nc\n"


def test_a_long_file_is_cut_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    sink = io.BytesIO()
    follower = LogFollower(lambda: path, sink, keep_bytes=100)
    with path.open("ab", buffering=0) as log:
        for number in range(50):
            log.write(b"line %d\n" % number)
            follower.copy()
            assert path.stat().st_size <= 108
    assert sink.getvalue() == b"".join(b"line %d\n" % number for number in range(50))


def test_a_file_that_somebody_keeps_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1000)
    sink = io.BytesIO()
    LogFollower(lambda: path, sink, keep_bytes=None).copy()
    assert path.stat().st_size == 1000
    assert len(sink.getvalue()) == 1000
