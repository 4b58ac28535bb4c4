"""`pocketllm doctor`: one line per thing that serving needs, with the remedy if it is missing.

``ok`` works, ``note`` works with what the line says, ``FAIL`` keeps a server from starting.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

from pocket_backend.api import EngineArgs
from pocket_backend.api.errors import ConfigurationError, ModelLoadError, PocketLLMError
from pocket_backend.cli import gateway
from pocket_backend.executors.cpu_quota import cpu_quota, quota_threads
from pocket_backend.text.gguf_files import gguf_model_file, gguf_parts
from pocket_backend.triton import installation, ports, shm
from pocket_backend.triton.launcher import check_model_file, find_model_repository
from pocket_backend.triton.settings import FAKE_MODEL

_PORTS = ports.Ports()
_EXTRAS = {
    "gateway": gateway.PACKAGES,
    "torch": ("torch", "transformers"),
}


class Note(str):
    """The detail of a check that passed, but that its reader may want to act on."""

    __slots__ = ()


Check = Callable[[], str]
"""Returns what it found; raises a PocketLLMError with the remedy if that cannot work."""


def doctor(model: str | None, *, as_json: bool = False) -> int:
    """Print every check; 1 if one failed.

    As JSON: ``{"ok": bool, "checks": [{"name", "verdict", "detail"}]}``, with the verdicts of the
    text in small letters.
    """
    found = []
    for name, check in _checks(model):
        try:
            detail = check()
            verdict = "note" if isinstance(detail, Note) else "ok"
        except PocketLLMError as error:
            verdict, detail = "FAIL", str(error)
        found.append({"name": name, "verdict": verdict.lower(), "detail": str(detail)})
        if not as_json:
            print(f"{verdict:4}  {name:18} {detail}")
    failed = any(item["verdict"] == "fail" for item in found)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": found}, ensure_ascii=False, indent=2))
    return 1 if failed else 0


def _checks(model: str | None) -> tuple[tuple[str, Check], ...]:
    return (
        ("Python", _python),
        ("numpy", _numpy),
        ("libpython", _libpython),
        ("Triton server", _triton),
        ("C++ engine", _native),
        ("processors", _processors),
        ("memory", _memory),
        ("shared memory", _shared_memory),
        ("ports", _ports),
        ("tritonclient", _client),
        ("gateway", lambda: _extra("gateway")),
        ("PyTorch backend", lambda: _extra("torch")),
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
    path = _import("pocket_cpp_core", "the engine is not built: pip install .")
    from pocket_backend.executors.cpp_engine import kernel_isa

    return f"{path}, kernels for {kernel_isa()}"


def _processors() -> str:
    """What the engine's threads get: the affinity mask, and a container's quota."""
    allowed = len(os.sched_getaffinity(0))
    if threads := quota_threads():
        return Note(
            f"{allowed}, of which this container may use {cpu_quota():g}: {threads} compute threads"
        )
    if allowed == 1:
        return Note("1: the engine shares it with Triton; answers will be slow")
    return f"{allowed} of {os.cpu_count()}"


def _memory() -> str:
    from pocket_backend.executors.memory import available_memory

    available = available_memory()
    return "not known" if available is None else f"{available >> 20:,} MiB available"


def _ports() -> str:
    """The default ports; another server may rightly hold them."""
    try:
        ports.resolve(_PORTS, "127.0.0.1")
    except ConfigurationError as error:
        return Note(str(error))
    return ", ".join(f"{port} ({name})" for name, port in _PORTS.named()) + " are free"


def _extra(name: str) -> str:
    missing = [package for package in _EXTRAS[name] if importlib.util.find_spec(package) is None]
    if missing:
        return Note(f"{', '.join(missing)} not installed: pip install 'pocketllm[{name}]'")
    return "installed"


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
    """Which backend would serve it, from its headers, and whether its weights fit."""
    from pocket_backend.cli.inspect import judge
    from pocket_backend.cli.options import model_path
    from pocket_backend.executors.memory import available_memory

    path = model_path(given)
    check_model_file(path)
    verdict = judge(EngineArgs(model=path))
    if verdict.backend is None:
        raise ModelLoadError(f"{path}: {verdict.reason}")
    size = 0 if path == FAKE_MODEL else _size(Path(path).expanduser())
    available = available_memory()
    if available is not None and size > available:
        raise ConfigurationError(
            f"{path} has {size >> 20:,} MiB of weights, but {available >> 20:,} MiB of memory are "
            "available: free some, or take a smaller model"
        )
    return f"{path}, {size >> 20:,} MiB, served by {verdict.backend}: {verdict.reason}"


def _size(path: Path) -> int:
    """Bytes of the weights at ``path``."""
    path = gguf_model_file(path)
    files = path.glob("*.safetensors") if path.is_dir() else gguf_parts(path)
    return sum(file.stat().st_size for file in files)
