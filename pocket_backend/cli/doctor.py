"""`pocketllm doctor`: one line per thing that serving needs, with the remedy if it is missing."""

from __future__ import annotations

import importlib
import platform
import shutil
from collections.abc import Callable

from pocket_backend.api.errors import ConfigurationError, PocketLLMError
from pocket_backend.triton import installation, shm
from pocket_backend.triton.launcher import check_model_file, find_model_repository

Check = Callable[[], str]


def doctor(model: str | None) -> int:
    """Print every check; 1 if one failed."""
    failed = 0
    for name, check in _checks(model):
        try:
            verdict, detail = "ok", check()
        except PocketLLMError as error:
            verdict, detail = "FAIL", str(error)
            failed += 1
        print(f"{verdict:4}  {name:18} {detail}")
    return 1 if failed else 0


def _checks(model: str | None) -> tuple[tuple[str, Check], ...]:
    return (
        ("Python", _python),
        ("numpy", _numpy),
        ("libpython", _libpython),
        ("Triton server", _triton),
        ("C++ engine", _native),
        ("tritonclient", _client),
        ("shared memory", _shared_memory),
        ("model repository", lambda: str(find_model_repository())),
        ("model", lambda: _model(model)),
    )


def _python() -> str:
    installation.check_python()
    return platform.python_version()


def _numpy() -> str:
    import numpy as np

    if int(np.__version__.split(".")[0]) >= 2:
        raise ConfigurationError(f"{np.__version__}: Triton's stub needs numpy<2")
    return np.__version__


def _libpython() -> str:
    directories = installation.find_libpython_dirs()
    return str(directories[0]) if directories else "found by the loader"


def _triton() -> str:
    return str(installation.find_triton().server)


def _native() -> str:
    return _import("pocket_cpp_core", "the engine is not built: pip install .")


def _client() -> str:
    return _import("tritonclient", "needed by the demo: pip install 'tritonclient[grpc]'")


def _import(name: str, remedy: str) -> str:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(f"{remedy} ({error})") from None
    return str(getattr(module, "__file__", None) or name)


def _shared_memory() -> str:
    shm.check_free_space()
    return f"{shutil.disk_usage(shm.SHM_DIR).free >> 20} MiB free"


def _model(given: str | None) -> str:
    from pocket_backend.cli.options import model_path

    path = model_path(given)
    check_model_file(path)
    return path
