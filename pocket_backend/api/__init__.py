"""Public value types: arguments, sampling parameters, requests, results and errors.

Imports nothing else of the package; everything may import it.
"""

from pocket_backend.api.capabilities import BackendCapabilities
from pocket_backend.api.engine_args import EngineArgs
from pocket_backend.api.errors import (
    BackendNotImplementedError,
    BackendUnavailableError,
    ConfigurationError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    PocketLLMError,
    RequestCancelledError,
    TensorParallelSupervisorError,
    UnsupportedFeatureError,
)
from pocket_backend.api.older_spi import (
    BackendContext,
    BackendFactory,
    EngineBackend,
    create_backend,
)
from pocket_backend.api.sampling_params import SamplingParams
from pocket_backend.api.types import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    TimingMetrics,
    TokenEvent,
    TokenLogprob,
    Usage,
)

__all__ = [
    "BackendCapabilities",
    "BackendContext",
    "BackendFactory",
    "BackendNotImplementedError",
    "BackendUnavailableError",
    "ConfigurationError",
    "DeadlineExceededError",
    "EngineArgs",
    "EngineBackend",
    "EngineError",
    "FinishReason",
    "GenerationRequest",
    "GenerationResult",
    "InvalidRequestError",
    "ModelLoadError",
    "OverloadedError",
    "PocketLLMError",
    "RequestCancelledError",
    "SamplingParams",
    "TensorParallelSupervisorError",
    "TimingMetrics",
    "TokenEvent",
    "TokenLogprob",
    "UnsupportedFeatureError",
    "Usage",
    "create_backend",
]
