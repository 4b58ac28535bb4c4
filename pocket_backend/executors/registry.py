"""From ``EngineArgs`` to an executor. Backends are imported only when they are asked for."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pocket_backend.api import (
    BackendNotImplementedError,
    BackendUnavailableError,
    ConfigurationError,
    ModelLoadError,
)
from pocket_backend.api.errors import short_repr
from pocket_backend.observability.logging import get_logger, log_event
from pocket_backend.text.gguf_files import gguf_models

if TYPE_CHECKING:
    from pocket_backend.api import EngineArgs
    from pocket_backend.executors.base import BackendExecutor

_log = get_logger("executors")
_GGUF_MAGIC = b"GGUF"
_TORCH_PACKAGES = ("torch", "transformers")


def _create_cpp(args: EngineArgs) -> BackendExecutor:
    from pocket_backend.executors.cpp_engine import CppEngineBackend

    return CppEngineBackend.from_args(args)


def _create_torch(args: EngineArgs) -> BackendExecutor:
    try:
        from pocket_backend.executors.torch_engine import PyTorchBackend
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend 'torch' cannot be imported ({error}); install pocketllm[torch]"
        ) from error
    return PyTorchBackend.from_args(args)


def _create_fake(args: EngineArgs) -> BackendExecutor:
    from pocket_backend.executors.fake import FakeExecutor, FakeOptions

    options = dict(args.backend_options)
    options.setdefault("max_slots", args.max_batch_size)
    options.setdefault("max_batch_tokens", args.max_num_batched_tokens)
    if args.max_model_len is not None:
        options.setdefault("max_context", args.max_model_len)
    if args.kv_cache_tokens is not None:
        block_size = FakeOptions.from_mapping(options).block_size
        options.setdefault("num_blocks", max(1, args.kv_cache_tokens // block_size))
    return FakeExecutor(FakeOptions.from_mapping(options))


_FACTORIES: dict[str, Callable[[EngineArgs], BackendExecutor]] = {
    "cpp": _create_cpp,
    "fake": _create_fake,
    "torch": _create_torch,
}


def available_backends() -> tuple[str, ...]:
    """Names that ``create_executor`` can build, without importing them."""
    return tuple(sorted(_FACTORIES))


def register_backend(name: str, factory: Callable[[EngineArgs], BackendExecutor]) -> None:
    """Make ``backend=name`` build an executor with ``factory`` (an extension point)."""
    if name in _FACTORIES:
        raise ConfigurationError(f"backend: {name!r} is already registered")
    _FACTORIES[name] = factory


def is_fake(args: EngineArgs) -> bool:
    """Whether ``args`` mean the fake backend; looks at no file."""
    return args.backend == "fake" or (args.backend == "auto" and args.model == "fake")


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend's name and, in a few words, why it is the one."""

    name: str
    reason: str


def choose_backend(args: EngineArgs) -> BackendChoice:
    """The backend that ``args`` mean. ``auto`` takes the C++ engine if it runs the model, else
    PyTorch if that is installed; only the model's headers are read.

    Raises:
        ModelLoadError: ``auto``, and the model is missing or of an unknown format.
    """
    if args.backend != "auto":
        return BackendChoice(args.backend, "asked for by name")
    if is_fake(args):
        return BackendChoice("fake", "the model is named 'fake'")
    kind = _model_format(args.model_path())
    from pocket_backend.executors.cpp_engine import unsupported_reason

    refusal = unsupported_reason(args.model_path())
    if refusal is None:
        return BackendChoice("cpp", f"the model is {kind}")
    if any(importlib.util.find_spec(package) is None for package in _TORCH_PACKAGES):
        return BackendChoice("cpp", f"the model is {kind}, and pocketllm[torch] is not installed")
    return BackendChoice(
        "torch", f"the model is {kind} that the C++ engine does not run: {refusal}"
    )


def resolve_backend(args: EngineArgs) -> str:
    """The name of ``choose_backend``; a choice made by ``auto`` is logged with its reason."""
    choice = choose_backend(args)
    if args.backend == "auto":
        log_event(_log, logging.INFO, "backend chosen", backend=choice.name, reason=choice.reason)
    return choice.name


def _model_format(path: Path) -> str:
    if path.is_dir():
        if (path / "config.json").is_file():
            return "a Hugging Face directory"
        if gguf_models(path):
            return "a directory with a GGUF file"
        raise ModelLoadError(
            f"model: the directory {str(path)!r} holds neither config.json nor a GGUF file"
        )
    if not path.is_file():
        raise ModelLoadError(
            f"model: no file {str(path)!r}; give a GGUF file or a Hugging Face directory"
        )
    with path.open("rb") as file:
        magic = file.read(len(_GGUF_MAGIC))
    if magic != _GGUF_MAGIC:
        raise ModelLoadError(
            f"model: {short_repr(path.name)} is not a GGUF file; give one, or a Hugging Face "
            "directory (config.json and safetensors)"
        )
    return "a GGUF file"


def _check_format(args: EngineArgs) -> None:
    if args.model_format == "auto" or is_fake(args):
        return
    kind = _model_format(args.model_path())
    if ("GGUF" in kind) != (args.model_format == "gguf"):
        raise ConfigurationError(
            f"model_format: got {args.model_format!r}, but the model is {kind}; leave it at 'auto'"
        )


def create_executor(args: EngineArgs) -> BackendExecutor:
    """Build the executor for ``args``.

    Raises:
        BackendNotImplementedError: no such backend in this version.
        BackendUnavailableError: it exists but cannot run here.
        ConfigurationError, ModelLoadError: the arguments or the model file do not work.
    """
    _check_format(args)
    name = resolve_backend(args)
    factory = _FACTORIES.get(name)
    if factory is None:
        raise BackendNotImplementedError(
            f"backend: got {short_repr(name)}; available are {', '.join(available_backends())}"
        )
    return factory(args)
