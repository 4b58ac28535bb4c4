"""Builds the wheel reproducibly, prints its SHA-256 and name: `python tools/build_wheel.py dist`.

The same sources, compiler and Python give the same bytes, wherever and whenever: times in the
archive are SOURCE_DATE_EPOCH (the last commit's unless it is set), file modes are normalised, and
the extension module holds no path of the build. Exit status: pip's.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit_time(source: Path) -> str:
    """Seconds since 1970 of the last commit; 1980-01-01, the oldest a zip can have, without one."""
    done = subprocess.run(
        ["git", "log", "-1", "--format=%ct"],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "315532800"


def build(source: Path, out: Path) -> Path:
    """The wheel of ``source``, in ``out``. Compiles into ``source``/build, as an installation does.

    Raises:
        subprocess.CalledProcessError: it does not build; pip has said why.
    """
    environment = dict(os.environ)
    environment.setdefault("SOURCE_DATE_EPOCH", commit_time(source))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as fresh:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        subprocess.run(
            [*command, "--no-build-isolation", "--wheel-dir", fresh, str(source)],
            check=True,
            env=environment,
        )
        [wheel] = Path(fresh).glob("*.whl")
        return wheel.replace(out / wheel.name)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    try:
        made = build(ROOT, Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
    except subprocess.CalledProcessError as failed:
        sys.exit(failed.returncode)
    print(f"{digest(made)}  {made}")
