"""``from pocketllm import EngineArgs, LLM, SamplingParams``: the older API's import name.

Like ``pocket_backend`` this loads neither torch nor the native module until a name needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pocket_backend import __version__
    from pocket_backend.api import (
        BackendCapabilities,
        BackendContext,
        BackendFactory,
        BackendNotImplementedError,
        BackendUnavailableError,
        ConfigurationError,
        DeadlineExceededError,
        EngineArgs,
        EngineBackend,
        EngineError,
        GenerationRequest,
        GenerationResult,
        InvalidRequestError,
        ModelLoadError,
        OverloadedError,
        PocketLLMError,
        RequestCancelledError,
        SamplingParams,
        TensorParallelSupervisorError,
        TimingMetrics,
        TokenEvent,
        UnsupportedFeatureError,
        Usage,
        create_backend,
    )
    from pocket_backend.core import (
        ContinuousBatchScheduler,
        ExecuteOutput,
        ExecuteRequest,
        RequestStatus,
        ScheduledRequest,
    )
    from pocket_backend.engine.async_llm import AsyncLLM
    from pocket_backend.engine.llm import LLM
    from pocket_backend.engine.unified import UnifiedEngine
    from pocket_backend.executors.base import BackendExecutor
    from pocket_backend.executors.cpp_engine import CppEngineBackend
    from pocket_backend.executors.torch_devices import device_kinds
    from pocket_backend.observability.health import HealthStatus

__all__ = [
    "LLM",
    "AsyncLLM",
    "BackendCapabilities",
    "BackendContext",
    "BackendExecutor",
    "BackendFactory",
    "BackendNotImplementedError",
    "BackendUnavailableError",
    "ConfigurationError",
    "ContinuousBatchScheduler",
    "CppEngineBackend",
    "DeadlineExceededError",
    "EngineArgs",
    "EngineBackend",
    "EngineError",
    "ExecuteOutput",
    "ExecuteRequest",
    "GenerationRequest",
    "GenerationResult",
    "HealthStatus",
    "InvalidRequestError",
    "ModelLoadError",
    "OverloadedError",
    "PocketLLMError",
    "RequestCancelledError",
    "RequestStatus",
    "SamplingParams",
    "ScheduledRequest",
    "TensorParallelSupervisorError",
    "TimingMetrics",
    "TokenEvent",
    "UnifiedEngine",
    "UnsupportedFeatureError",
    "Usage",
    "__version__",
    "create_backend",
    "device_kinds",
]

_ELSEWHERE = {
    "AsyncLLM": "pocket_backend.engine.async_llm",
    "BackendExecutor": "pocket_backend.executors.base",
    "ContinuousBatchScheduler": "pocket_backend.core",
    "CppEngineBackend": "pocket_backend.executors.cpp_engine",
    "ExecuteOutput": "pocket_backend.core",
    "ExecuteRequest": "pocket_backend.core",
    "HealthStatus": "pocket_backend.observability.health",
    "LLM": "pocket_backend.engine.llm",
    "PyTorchBackend": "pocket_backend.executors.torch_engine",
    "RequestStatus": "pocket_backend.core",
    "ScheduledRequest": "pocket_backend.core",
    "UnifiedEngine": "pocket_backend.engine.unified",
    "__version__": "pocket_backend",
    "device_kinds": "pocket_backend.executors.torch_devices",
}


def __getattr__(name: str) -> object:
    if name not in __all__ and name not in _ELSEWHERE:  # PyTorchBackend needs torch
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "pocket_backend.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
