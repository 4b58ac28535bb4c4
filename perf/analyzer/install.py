"""Finds or installs perf_analyzer: a pinned wheel in a virtual environment of its own.

The wheel leaves two libraries to the system. ``libcudart.so.12`` (needed to start, though no GPU is
used) comes from its own wheel; ``libb64.so.0d`` from the system or, without root, out of Debian's
package.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perf.engines.base import EngineFailure
from perf.engines.environments import ROOT, Peer, ensure_venv

CACHE = ROOT / ".cache" / "perf-analyzer"
_VENV = CACHE / "venv"
_LIBRARIES = CACHE / "libraries"
_LIBB64 = "libb64.so.0d"
_LIBB64_PACKAGE = "libb64-0d"


@dataclass(frozen=True, slots=True)
class Analyzer:
    """A perf_analyzer that starts here."""

    program: Path
    version: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of this process's."""


def installed() -> Analyzer:
    """The pinned one, installed if need be.

    Raises:
        EngineFailure: it cannot be installed, or does not start; the message says why.
    """
    ensure_venv("perf_analyzer", Peer("", (("perf-analyzer.txt", False),)), _VENV)
    packages = next((_VENV / "lib").glob("python3.*")) / "site-packages"
    folders = [packages / "nvidia" / "cuda_runtime" / "lib"]
    if not _in_loader_cache(_LIBB64):
        folders.append(_fetch_libb64())
    return check(_VENV / "bin" / "perf_analyzer", library_path(folders))


def python() -> Path:
    """The interpreter that has matplotlib (after ``installed``)."""
    return _VENV / "bin" / "python"


def check(program: Path, environment: Mapping[str, str] | None = None) -> Analyzer:
    """``program`` with its version.

    Raises:
        EngineFailure: it does not start; the message has what it said, such as the missing library.
    """
    try:
        done = subprocess.run(
            [str(program), "--version"],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except OSError as error:
        raise EngineFailure(f"perf_analyzer does not start: {error}") from error
    words = (done.stdout + done.stderr).split()  # it prints to stderr
    if done.returncode != 0 or "Version" not in words:
        said = (done.stderr or done.stdout).strip()[:600]
        raise EngineFailure(f"{program} does not run here (status {done.returncode}): {said}")
    return Analyzer(program, words[words.index("Version") + 1], environment or {})


def library_path(folders: list[Path]) -> dict[str, str]:
    old = os.environ.get("LD_LIBRARY_PATH")
    parts = [*map(str, folders), *([old] if old else [])]
    return {"LD_LIBRARY_PATH": ":".join(parts)}


def _in_loader_cache(name: str) -> bool:
    try:
        done = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return name in done.stdout


def _fetch_libb64() -> Path:
    """The folder with the library, unpacked from Debian's package without installing it."""
    found = sorted(_LIBRARIES.rglob(_LIBB64))
    if not found:
        _LIBRARIES.mkdir(parents=True, exist_ok=True)
        try:
            for command in (["apt-get", "download", _LIBB64_PACKAGE], ["dpkg", "-x"]):
                archives = sorted(map(str, _LIBRARIES.glob("*.deb")))
                unpack = [archives[-1], "."] if command[0] == "dpkg" else []
                subprocess.run(
                    [*command, *unpack], cwd=_LIBRARIES, capture_output=True, text=True, check=True
                )
        except (OSError, IndexError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or error
            raise EngineFailure(
                f"perf_analyzer needs {_LIBB64}; install {_LIBB64_PACKAGE} (Debian, Ubuntu), or "
                f"run apt-get update so that it can be fetched ({str(reason).strip()[:200]})"
            ) from error
        found = sorted(_LIBRARIES.rglob(_LIBB64))
    if not found:
        raise EngineFailure(f"{_LIBB64_PACKAGE} has no {_LIBB64}: install it by hand")
    return found[0].parent
