"""The older API's interface of a backend, which this version does not have: its names can be
imported, and whoever uses one is told what to use instead.

There a backend was a whole engine (``generate``, ``stream``, ``health``, ...). Here scheduling,
text and metrics are shared, and a backend is a ``BackendExecutor``: it computes steps.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pocket_backend.api.errors import UnsupportedFeatureError

_REGISTER = (
    "a backend is a BackendExecutor here; make it known with "
    "pocket_backend.executors.registry.register_backend(name, factory)"
)


def _refuse(name: str, remedy: str = _REGISTER) -> NoReturn:
    raise UnsupportedFeatureError(name, remedy)


class EngineBackend:
    """Refused when subclassed or made: see ``BackendExecutor``."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        _refuse("EngineBackend")

    def __init_subclass__(cls, **_options: Any) -> None:
        _refuse("EngineBackend")


class BackendContext:
    """Refused when made: a factory gets the ``EngineArgs``."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        _refuse("BackendContext", f"a factory gets the EngineArgs; {_REGISTER}")


class BackendFactory:
    """Refused when subclassed or made: a factory is any function from ``EngineArgs`` to a
    ``BackendExecutor``."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        _refuse("BackendFactory")

    def __init_subclass__(cls, **_options: Any) -> None:
        _refuse("BackendFactory")


def create_backend(*_args: Any, **_options: Any) -> NoReturn:
    """Refused: ``LLM`` generates, ``create_executor`` makes a backend.

    Raises:
        UnsupportedFeatureError: always; its message says so.
    """
    _refuse(
        "create_backend",
        "LLM(EngineArgs(...)) generates and streams, UnifiedEngine.from_args makes its engine, and "
        "pocket_backend.executors.registry.create_executor(args) a backend alone",
    )
