"""The dependency direction of docs/architecture.md, checked on the import graph of the sources.

Each rule is a function from (path, source text) to complaints, so that the self-tests at the end
can show that it detects a violation.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Package -> packages of pocket_backend that it may import besides itself.
_BASE = {"api", "observability"}
_MIDDLE = _BASE | {"text", "sampling", "kv"}
_CORE = _MIDDLE | {"core"}
_EXECUTORS = _CORE | {"executors"}
_ENGINE = _EXECUTORS | {"engine"}
_TOP = _ENGINE | {"triton", "cli", "compat"}
PYTHON_LAYERS: dict[str, set[str]] = {
    "api": set(),
    "observability": set(),
    "text": _BASE,
    "sampling": _BASE,
    "kv": _BASE,
    "core": _MIDDLE,
    "executors": _CORE,
    "engine": _EXECUTORS,
    "triton": _ENGINE,
    "cli": _TOP,
    "compat": _ENGINE,
}
NATIVE_MODULES = {"pocket_cpp_core"}
NATIVE_ALIASES = {
    PurePosixPath("pocket_backend/compat/pocketllm_cpp/__init__.py"),
    PurePosixPath("pocket_backend/compat/dsv4_cpp_core/__init__.py"),
}
TORCH_MODULES = {"torch", "transformers", "accelerate"}

CPP_LAYERS: dict[str, set[str]] = {}
for _name, _below in (
    ("base", ()),
    ("quant", ("base",)),
    ("io", ("quant",)),
    ("cpu", ("quant",)),
    ("kv", ("io", "cpu")),
    ("models", ("kv",)),
    ("sampling", ("models",)),
    ("runtime", ("models", "sampling")),
    ("python", ("runtime",)),
    ("tools", ("runtime",)),
):
    CPP_LAYERS[_name] = set(_below).union(*(CPP_LAYERS[below] for below in _below))

MODEL_PY_LINES = 150
Rule = Callable[[PurePosixPath, str], Iterator[str]]


# --- Python ---------------------------------------------------------------------------------------


def imported_modules(path: PurePosixPath, source: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, nested and TYPE_CHECKING ones included."""
    package = path.with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield node.lineno, module
            # ``from pocket_backend import engine`` imports a sub-package, too.
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif (
            isinstance(node, ast.Call)
            and _call_name(node) in {"import_module", "__import__", "importorskip"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            yield node.lineno, node.args[0].value


def _call_name(node: ast.Call) -> str:
    target = node.func
    return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")


def layer_direction(path: PurePosixPath, source: str) -> Iterator[str]:
    parts = path.parts
    if parts[0] != "pocket_backend" or len(parts) < 3:
        return  # pocket_backend/__init__.py resolves public names lazily
    layer = parts[1]
    allowed = PYTHON_LAYERS.get(layer)
    if allowed is None:
        yield f"{path}: {layer} is not a package of docs/architecture.md"
        return
    for line, module in imported_modules(path, source):
        target = module.split(".")
        if target[0] != "pocket_backend" or len(target) < 2 or target[1] not in PYTHON_LAYERS:
            continue
        if target[1] != layer and target[1] not in allowed:
            yield f"{path}:{line}: {layer} may not import {target[1]} ({module})"


def torch_only_in_torch_executors(path: PurePosixPath, source: str) -> Iterator[str]:
    if path.parts[0] not in {"pocket_backend", "client", "model_repository"}:
        return
    if path.parent == PurePosixPath("pocket_backend/executors") and path.name.startswith("torch_"):
        return
    for line, module in imported_modules(path, source):
        if module.split(".")[0] in TORCH_MODULES:
            yield f"{path}:{line}: {module} may be imported only in executors/torch_*"


def native_only_in_cpp_executor(path: PurePosixPath, source: str) -> Iterator[str]:
    if path.parts[0] not in {"pocket_backend", "client", "model_repository"}:
        return
    if path in NATIVE_ALIASES:  # a second name of the native module
        return
    if path == PurePosixPath("pocket_backend/executors/cpp_engine.py"):
        tree = ast.parse(source)
        for node in tree.body:  # module level: would load with the package
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
                if NATIVE_MODULES & {name.split(".")[0] for name in names}:
                    yield f"{path}:{node.lineno}: import the native module lazily"
        return
    for line, module in imported_modules(path, source):
        if module.split(".")[0] in NATIVE_MODULES:
            yield f"{path}:{line}: {module} may be imported only in executors/cpp_engine.py"


def client_is_independent(path: PurePosixPath, source: str) -> Iterator[str]:
    if path.parts[0] != "client":
        return
    for line, module in imported_modules(path, source):
        if module.split(".")[0] in {"pocket_backend", "pocketllm", *NATIVE_MODULES}:
            yield f"{path}:{line}: the client may not import {module}: the wire is the contract"


def model_py_is_a_shell(path: PurePosixPath, source: str) -> Iterator[str]:
    if path.parts[0] == "model_repository" and path.name == "model.py":
        lines = len(source.splitlines())
        if lines >= MODEL_PY_LINES:
            yield f"{path}: {lines} lines; a model.py is a shell of under {MODEL_PY_LINES}"


def core_sees_no_tensors(path: PurePosixPath, source: str) -> Iterator[str]:
    """core and kv see integers: no tensors, no clocks, no threads."""
    if path.parts[:2] not in {("pocket_backend", "core"), ("pocket_backend", "kv")}:
        return
    for line, module in imported_modules(path, source):
        if module.split(".")[0] in {"time", "threading", "asyncio", "queue", *TORCH_MODULES}:
            yield f"{path}:{line}: {module} does not belong into {path.parts[1]}"


PYTHON_RULES: tuple[Rule, ...] = (
    layer_direction,
    torch_only_in_torch_executors,
    native_only_in_cpp_executor,
    client_is_independent,
    model_py_is_a_shell,
    core_sees_no_tensors,
)


# --- C++ ------------------------------------------------------------------------------------------

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
_ISA_HEADER = re.compile(r"(-inl\.h$|avx|vnni|amx|immintrin|x86intrin|arm_neon)")


def cpp_layer(path: PurePosixPath) -> str | None:
    parts = path.parts
    if parts[:3] == ("cpp_engine", "include", "pocket") or parts[:2] == ("cpp_engine", "src"):
        index = 3 if parts[1] == "include" else 2
        return parts[index] if len(parts) > index + 1 else None
    if parts[0] == "cpp_engine" and len(parts) > 2 and parts[1] in {"python", "tools"}:
        return parts[1]
    return None  # tests may include everything


def cpp_include_direction(path: PurePosixPath, source: str) -> Iterator[str]:
    layer = cpp_layer(path)
    if layer is None:
        return
    allowed = CPP_LAYERS.get(layer)
    if allowed is None:
        yield f"{path}: {layer} is not a layer of docs/architecture.md"
        return
    for match in _INCLUDE.finditer(source):
        header = PurePosixPath(match.group(1))
        line = source.count("\n", 0, match.start()) + 1
        target = header.parts[1] if header.parts[0] == "pocket" and len(header.parts) > 2 else None
        if header.parts[0] == "..":  # a private header: it must not be another layer's
            resolved = PurePosixPath(posixpath.normpath(path.parent / header))
            target = cpp_layer(resolved) or f"{resolved.parent}"
        if target is not None and target != layer and target not in allowed:
            yield f"{path}:{line}: {layer} may not include {header}"


def models_reach_kernels_through_the_table(path: PurePosixPath, source: str) -> Iterator[str]:
    if cpp_layer(path) not in {"models", "runtime", "sampling"}:
        return
    for match in _INCLUDE.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        if _ISA_HEADER.search(match.group(1)):
            yield f"{path}:{line}: {match.group(1)}: kernels are reached through the kernel table"


CPP_RULES: tuple[Rule, ...] = (cpp_include_direction, models_reach_kernels_through_the_table)


# --- the repository -------------------------------------------------------------------------------


def _files(folders: Iterable[str], suffixes: set[str]) -> list[Path]:
    found = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes and path.is_file()
    ]
    assert found, f"no sources under {folders}"
    return found


def _complaints(files: Iterable[Path], rules: Iterable[Rule]) -> list[str]:
    found: list[str] = []
    for path in files:
        relative = PurePosixPath(path.relative_to(ROOT).as_posix())
        source = path.read_text(encoding="utf-8")
        for rule in rules:
            found.extend(rule(relative, source))
    return found


def test_python_dependency_direction() -> None:
    files = _files(("pocket_backend", "client", "model_repository"), {".py"})
    assert not _complaints(files, PYTHON_RULES)


def test_cpp_include_direction() -> None:
    files = _files(("cpp_engine",), {".h", ".cpp"})
    assert not _complaints(files, CPP_RULES)


def test_every_package_is_in_the_table() -> None:
    packages = {path.parent.name for path in (ROOT / "pocket_backend").glob("*/__init__.py")}
    assert packages == set(PYTHON_LAYERS)


# --- the rules detect violations ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (layer_direction, "pocket_backend/kv/pool.py", "from pocket_backend.core import step"),
        (layer_direction, "pocket_backend/api/types.py", "import pocket_backend.text"),
        (layer_direction, "pocket_backend/core/x.py", "from ..executors.base import A"),
        (layer_direction, "pocket_backend/engine/x.py", "from pocket_backend import triton"),
        (layer_direction, "pocket_backend/text/x.py", "def f():\n    import pocket_backend.kv"),
        (layer_direction, "pocket_backend/novel/x.py", ""),
        (
            layer_direction,
            "pocket_backend/kv/x.py",
            "from importlib import import_module\nimport_module('pocket_backend.engine')",
        ),
        (torch_only_in_torch_executors, "pocket_backend/executors/fake.py", "import torch.nn"),
        (torch_only_in_torch_executors, "pocket_backend/text/x.py", "from transformers import A"),
        (native_only_in_cpp_executor, "pocket_backend/engine/x.py", "import pocket_cpp_core"),
        (native_only_in_cpp_executor, "pocket_backend/executors/cpp_engine.py",
         "from pocket_cpp_core import Engine"),
        (client_is_independent, "client/pocket_client/x.py", "import pocket_backend.api"),
        (model_py_is_a_shell, "model_repository/m/1/model.py", "x = 1\n" * MODEL_PY_LINES),
        (core_sees_no_tensors, "pocket_backend/core/x.py", "from time import monotonic"),
        (cpp_include_direction, "cpp_engine/src/models/a.cpp", '#include "pocket/runtime/e.h"'),
        (cpp_include_direction, "cpp_engine/include/pocket/io/a.h", '#include "pocket/cpu/k.h"'),
        (cpp_include_direction, "cpp_engine/src/novel/a.cpp", ""),
        (cpp_include_direction, "cpp_engine/src/models/a.cpp", '#include "../runtime/e.h"'),
        (cpp_include_direction, "cpp_engine/src/models/a.cpp", '#include "../../tests/kv/e.h"'),
        (
            models_reach_kernels_through_the_table,
            "cpp_engine/src/models/a.cpp",
            '#include "pocket/cpu/matmul_avx512.h"',
        ),
        (
            models_reach_kernels_through_the_table,
            "cpp_engine/src/models/a.cpp",
            "#include <immintrin.h>",
        ),
    ],
)  # fmt: skip
def test_rule_detects_a_violation(rule: Rule, path: str, source: str) -> None:
    assert list(rule(PurePosixPath(path), source))


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (layer_direction, "pocket_backend/core/x.py", "from pocket_backend.kv import pool"),
        (layer_direction, "pocket_backend/core/x.py", "from .step import A"),
        (torch_only_in_torch_executors, "pocket_backend/executors/torch_llama.py", "import torch"),
        (native_only_in_cpp_executor, "pocket_backend/executors/cpp_engine.py",
         "def f():\n    import pocket_cpp_core"),
        (native_only_in_cpp_executor, "pocket_backend/compat/pocketllm_cpp/__init__.py",
         "from pocket_cpp_core import *"),
        (cpp_include_direction, "cpp_engine/src/runtime/a.cpp", '#include "pocket/cpu/k.h"'),
        (cpp_include_direction, "cpp_engine/src/models/b/a.h", '#include "../compute.h"'),
        (cpp_include_direction, "cpp_engine/tests/kv/a.cpp", '#include "pocket/runtime/e.h"'),
    ],
)  # fmt: skip
def test_rule_accepts_what_is_allowed(rule: Rule, path: str, source: str) -> None:
    assert not list(rule(PurePosixPath(path), source))
