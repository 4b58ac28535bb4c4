"""Writes the hashes of requirements/image-*.txt (`make lock`).

Each file is the whole environment of an image, pinned and installed without dependencies; change
versions there by hand, then run this. pip refuses a file with hashes as soon as anything differs
from them. A comment at the head of a file stays.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)\s*\\?$")
_HASH = re.compile(r"^\s+--hash=sha256:[0-9a-f]{64}\s*\\?$")
PYTHON = "3.12"
"""Of the public Triton image. Hashes are those of every file of a version, for any Python."""


def locked_files() -> list[Path]:
    return sorted(REQUIREMENTS.glob("image-*.txt"))


def head(text: str) -> str:
    """The comment at the beginning."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[: next((i for i, x in enumerate(lines) if x[0] != "#"), len(lines))])


def pins(text: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package, by normalised name.

    Raises:
        ValueError: a line is neither a pin, a hash nor a comment, or a package is there twice.
    """
    found: dict[str, tuple[str, int]] = {}
    name = ""
    for line in text.splitlines():
        if _HASH.match(line) and name:
            version, count = found[name]
            found[name] = version, count + 1
        elif pin := _PIN.match(line):
            name = normalised(pin["name"])
            if name in found:
                raise ValueError(f"{name}: pinned twice")
            found[name] = pin["version"], 0
        elif line and not line.startswith("#"):
            raise ValueError(f"{line!r}: must be NAME==VERSION, a hash or a comment")
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lock(path: Path) -> str:
    """``path`` with the hashes that the package index has now.

    Raises:
        SystemExit: uv cannot; says why.
    """
    text = path.read_text()
    environment = dict(os.environ)
    if index := environment.get("PIP_INDEX_URL"):
        environment.setdefault("UV_DEFAULT_INDEX", index)
    if certificates := environment.get("PIP_CERT"):
        environment.setdefault("SSL_CERT_FILE", certificates)
    flags = ("--quiet", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate")
    command = [sys.executable, "-m", "uv", "pip", "compile", *flags, "--python-version", PYTHON]
    done = subprocess.run(
        [*command, "--no-emit-index-url", "-"],
        input="\n".join(f"{name}=={version}" for name, (version, _) in pins(text).items()),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode != 0:
        raise SystemExit(f"{path.name}: {done.stderr.strip()}")
    return head(text) + done.stdout


if __name__ == "__main__":
    for file in locked_files():
        file.write_text(lock(file))
        print(f"{file.relative_to(ROOT)}: {len(pins(file.read_text()))} packages")
