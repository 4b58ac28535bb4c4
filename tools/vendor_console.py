"""Fetch the web console's libraries from npm, at pinned versions, and write them into the package.

    python tools/vendor_console.py            # rewrite the folder and its checksums
    python tools/vendor_console.py --check    # fetch, and compare with what is there

The packages' built files are taken as they are, less the reference to a source map that is not
shipped. Needs `npm`; exit status 1 if anything differs from what is pinned here.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "client/pocket_client/gateway/console/static/vendor"
CHECKSUMS = "SHA256SUMS"


@dataclass(frozen=True, slots=True)
class Package:
    """``files``: path in the package -> name here. ``integrity`` is npm's, of the tarball."""

    name: str
    version: str
    integrity: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "marked",
        "18.2.1",
        "ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==",
        {"lib/marked.esm.js": "marked.js", "LICENSE": "marked.LICENSE"},
    ),
    Package(
        "dompurify",
        "3.5.0",
        "LYC0ZkE8P1V42JsRYTwMdme/2ET8SpOc5AA2eOFjP/IadvRd2fwiT4TVz5vkfy0XUx12aS2UaRkTnfVPNOv9vw==",
        {"dist/purify.min.js": "purify.js", "LICENSE": "purify.LICENSE"},
    ),
    Package(
        "uplot",
        "1.6.32",
        "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {
            "dist/uPlot.iife.min.js": "uplot.js",
            "dist/uPlot.min.css": "uplot.css",
            "LICENSE": "uplot.LICENSE",
        },
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    check = parser.parse_args().check
    if shutil.which("npm") is None:
        sys.exit("npm is not installed; install Debian's package npm")
    files: dict[str, bytes] = {}
    for package in PACKAGES:
        files.update(fetch(package))
    files[CHECKSUMS] = checksums(files)
    if check:
        changed = [
            name
            for name, body in files.items()
            if not (VENDOR / name).is_file() or (VENDOR / name).read_bytes() != body
        ]
        print("as pinned" if not changed else f"differ: {', '.join(changed)}")
        return bool(changed)
    shutil.rmtree(VENDOR, ignore_errors=True)
    VENDOR.mkdir(parents=True)
    for name, body in files.items():
        (VENDOR / name).write_bytes(body)
        print(f"{len(body):8,} {name}")
    return 0


def fetch(package: Package) -> dict[str, bytes]:
    """Name here -> contents; ends the program if npm's package is not the pinned one."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        data = (Path(folder) / made.stdout.split()[-1]).read_bytes()
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != package.integrity:
        sys.exit(f"{package.name} {package.version} is not the pinned package")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {
            name: _without_source_map(archive.extractfile(f"package/{path}").read())  # type: ignore[union-attr]
            for path, name in package.files.items()
        }


def _without_source_map(body: bytes) -> bytes:
    return re.sub(rb"\n//# sourceMappingURL=\S+\s*$", b"\n", body)


def checksums(files: dict[str, bytes]) -> bytes:
    """As `sha256sum -c` reads them."""
    lines = (f"{hashlib.sha256(body).hexdigest()}  {name}\n" for name, body in files.items())
    return "".join(sorted(lines, key=lambda line: line.split()[1])).encode()


if __name__ == "__main__":
    sys.exit(main())
