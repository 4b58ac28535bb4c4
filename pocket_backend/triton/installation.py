"""Finds the Triton server: the `nvidia-pytriton` wheel or an installed `tritonserver`.

The Python backend runs models in *stub* processes that embed the interpreter they were built for,
so the stub must match the running Python and needs that version's shared libpython.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pocket_backend.api.errors import ConfigurationError

SUPPORTED_PYTHONS = ((3, 11), (3, 12))
"""The stub misreads string tensors under numpy 2, and numpy 1.26 supports up to 3.12."""

_SYSTEM_ROOT = Path("/opt/tritonserver")


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """Where the parts of one Triton server lie.

    ``stub`` is None when the Python backend directory brings its own, as in the public images: then
    ``backend_dir`` is used as it is.
    """

    server: Path
    backend_dir: Path
    """Holds ``libtriton_python.so`` and ``triton_python_backend_utils.py``."""
    stub: Path | None
    library_dirs: tuple[Path, ...]


def find_triton() -> TritonInstallation:
    """The server of the wheel if it is installed in this environment, else the system's.

    Raises:
        ConfigurationError: nothing found, or the wheel has no stub for this Python.
    """
    return _from_wheel() or _from_system() or _missing()


def check_python(version: tuple[int, int] | None = None) -> None:
    """Raises ConfigurationError unless the running interpreter is one that the stub supports."""
    found = version or sys.version_info[:2]
    if found not in SUPPORTED_PYTHONS:
        names = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED_PYTHONS)
        raise ConfigurationError(
            f"Python {found[0]}.{found[1]} is not supported: create the environment with Python "
            f"{names}"
        )


def find_libpython_dirs() -> tuple[Path, ...]:
    """Directories to put on the loader's path so that the stub finds its libpython.

    Empty when the dynamic loader finds the library by itself.

    Raises:
        ConfigurationError: this interpreter has no shared library (it was linked statically).
    """
    name = _libpython_name()
    for directory in _libpython_candidates():
        if (directory / name).exists():
            return (directory,)
    try:
        ctypes.CDLL(name)
    except OSError:
        major, minor = sys.version_info[:2]
        raise ConfigurationError(
            f"{name} not found: Triton's Python stub needs the shared library of Python "
            f"{major}.{minor}; install it (Debian: apt-get install libpython{major}.{minor}) or "
            "use a Python built with --enable-shared"
        ) from None
    return ()


def _libpython_name() -> str:
    return f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"


def _libpython_candidates() -> Iterator[Path]:
    libdir = sysconfig.get_config_var("LIBDIR")
    if libdir:
        yield Path(libdir)
        multiarch = sysconfig.get_config_var("MULTIARCH")
        if multiarch:
            yield Path(libdir) / multiarch
    # Relocated interpreters (python-build-standalone) record the LIBDIR of the build machine.
    yield Path(sys.base_prefix) / "lib"


def _from_wheel() -> TritonInstallation | None:
    for entry in _site_directories():
        root = entry / "pytriton" / "tritonserver"
        server = root / "bin" / "tritonserver"
        if not server.is_file():
            continue
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.is_file():
            raise ConfigurationError(
                f"the installed nvidia-pytriton has no Python {version} stub: install "
                "nvidia-pytriton 0.7.0"
            )
        libraries = entry / "nvidia_pytriton.libs"
        return TritonInstallation(
            server, root / "backends" / "python", stub, (libraries,) if libraries.is_dir() else ()
        )
    return None


def _site_directories() -> list[Path]:
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path]
    return [Path(path) for path in dict.fromkeys(paths) if path]


def _from_system() -> TritonInstallation | None:
    named = os.environ.get("POCKETLLM_TRITONSERVER")
    found = named or shutil.which("tritonserver") or str(_SYSTEM_ROOT / "bin" / "tritonserver")
    server = Path(found).resolve()
    if not server.is_file():
        if named:
            raise ConfigurationError(f"POCKETLLM_TRITONSERVER: {named} is not a file")
        return None
    root = server.parent.parent
    backend_dir = root / "backends" / "python"
    if not (backend_dir / "libtriton_python.so").is_file():
        raise ConfigurationError(
            f"{server} has no Python backend: expected {backend_dir}/libtriton_python.so"
        )
    return TritonInstallation(server, backend_dir, None, (root / "lib",))


def _missing() -> TritonInstallation:
    raise ConfigurationError(
        "no Triton server found: install the nvidia-pytriton package "
        "(pip install --no-deps nvidia-pytriton==0.7.0), or put tritonserver on PATH"
    )
