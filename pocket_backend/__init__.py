"""PocketLLM's Python side: scheduling, KV memory, engine loop, text and the Triton runtime.

Importing this package loads neither torch nor the native module; names are resolved on first use
(PEP 562).  Sub-packages and the direction in which they may import each other are described in
``docs/architecture.md`` and enforced by ``tests/test_boundaries.py``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pocket_backend.api import EngineArgs, SamplingParams
    from pocket_backend.engine.llm import LLM
    from pocket_backend.engine.unified import UnifiedEngine
    from pocket_backend.executors.cpp_engine import CppEngineBackend
    from pocket_backend.executors.torch_engine import PyTorchBackend

__version__ = "0.1.0"

_LAZY = {
    "CppEngineBackend": "pocket_backend.executors.cpp_engine",
    "EngineArgs": "pocket_backend.api",
    "LLM": "pocket_backend.engine.llm",
    "PyTorchBackend": "pocket_backend.executors.torch_engine",
    "SamplingParams": "pocket_backend.api",
    "UnifiedEngine": "pocket_backend.engine.unified",
}

__all__ = [
    "LLM",
    "CppEngineBackend",
    "EngineArgs",
    "PyTorchBackend",
    "SamplingParams",
    "UnifiedEngine",
]


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
