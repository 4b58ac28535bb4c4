"""Loads a model with Transformers: where from, in which type, onto which device; and what is
missing when it does not work.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pocket_backend.api import (
    BackendUnavailableError,
    ConfigurationError,
    ModelLoadError,
    PocketLLMError,
)
from pocket_backend.api.errors import short_repr
from pocket_backend.executors.torch_attention import ATTENTION_NAME, paged_attention
from pocket_backend.executors.torch_linear import pack_linears
from pocket_backend.executors.torch_options import DTYPES, TorchOptions
from pocket_backend.executors.torch_quantisation import check_quantisation
from pocket_backend.text.gguf_files import gguf_model_file, gguf_parts
from pocket_backend.text.gguf_metadata import GgufMetadata

_GGUF_MAGIC = b"GGUF"
_MISSING_SHOWN = 4


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    model: Any
    device: torch.device
    dtype: torch.dtype
    """Type of the activations."""
    vocab_size: int
    """Ids that the tokenizer knows, at most those that the logits have."""
    eos_token_ids: frozenset[int]
    weight_bytes: int


def load_model(path: Path, options: TorchOptions) -> LoadedModel:
    """Load from a directory of Transformers, or from one GGUF file.

    Nothing is downloaded. Code from the directory runs only with ``trust_remote_code``.

    Raises:
        ModelLoadError: nothing there, or damaged, or of an unknown architecture.
        BackendUnavailableError: Transformers, or a package that the quantisation needs, is missing.
        ConfigurationError: the device does not exist here.
    """
    directory, gguf = _locate(path)
    device = _device(options.device)
    config = _config(directory) if gguf is None else {}
    model = _from_pretrained(directory, gguf, config, device, options).eval()
    vocab = int(model.config.get_text_config().vocab_size)
    weight_bytes = sum(p.nbytes for p in {p.data_ptr(): p for p in model.parameters()}.values())
    dtype = model.get_input_embeddings().weight.dtype
    if options.pack_linear:
        pack_linears(model)
    known = tokenizer_size(directory) if gguf is None else gguf_tokenizer_size(directory / gguf)
    return LoadedModel(
        model=model,
        device=device,
        dtype=dtype,
        vocab_size=vocab if known is None else min(vocab, known),
        eos_token_ids=_eos_ids(model, vocab),
        weight_bytes=weight_bytes,
    )


def tokenizer_size(directory: Path) -> int | None:
    """Highest id of tokenizer.json, plus one; None without that file."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text("utf-8"))
        vocab = content["model"]["vocab"]
        # BPE and WordPiece map pieces to ids; Unigram lists them.
        ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
        ids += [token["id"] for token in content.get("added_tokens") or ()]
        return int(max(ids)) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{file}: has no readable vocabulary: {error!r}") from error


def gguf_tokenizer_size(file: Path) -> int | None:
    """Entries of ``tokenizer.ggml.tokens``; None if the file has none."""
    with GgufMetadata(file) as metadata:
        return metadata.array_length("tokenizer.ggml.tokens")


def _locate(path: Path) -> tuple[Path, str | None]:
    """(directory, name of the GGUF file in it or None)."""
    path = gguf_model_file(path)
    if path.is_dir():
        return path, None
    if len(parts := gguf_parts(path)) > 1:  # Transformers reads the tensors of one file only
        raise ModelLoadError(
            f"model: {short_repr(path.name)} is split into {len(parts)} files, which the torch "
            "backend does not read; use the C++ engine, or one file (gguf-split --merge)"
        )
    if not path.is_file():
        raise ModelLoadError(
            f"model: no file or directory {str(path)!r}; give a directory with config.json and "
            "safetensors, or a GGUF file"
        )
    with path.open("rb") as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise ModelLoadError(f"model: {short_repr(path.name)} is not a GGUF file")
    return path.parent, path.name


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ConfigurationError(f"device: got {short_repr(name)}; not usable: {reason}") from error
    return device


def _config(directory: Path) -> dict[str, object]:
    try:
        config = json.loads((directory / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{directory / 'config.json'}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{directory / 'config.json'}: must be a JSON object")
    return config


def _from_pretrained(
    directory: Path,
    gguf: str | None,
    config: dict[str, object],
    device: torch.device,
    options: TorchOptions,
) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailableError(
            f"the PyTorch backend needs Transformers ({error}); install pocketllm[torch]"
        ) from error
    check_quantisation(config, transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    transformers.AttentionInterface.register(ATTENTION_NAME, paged_attention)
    dtype: Any = "auto" if options.dtype == "auto" else getattr(torch, DTYPES[options.dtype])
    if gguf is not None and options.dtype == "auto":
        dtype = torch.float32
    wanted: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": options.trust_remote_code,
        "local_files_only": True,
        "output_loading_info": True,
    }
    if gguf is not None:
        wanted["gguf_file"] = gguf
    if device.type != "cpu":
        wanted["device_map"] = {"": device}
    logging: Any = transformers.utils.logging
    with_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside Transformers are not the user's
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, **wanted)
    except PocketLLMError:
        raise
    except ImportError as error:
        raise BackendUnavailableError(f"model: a package is missing: {_line(error)}") from error
    except Exception as error:  # Transformers raises many kinds for files that do not fit
        raise ModelLoadError(
            f"model: Transformers cannot load {short_repr(directory.name)}: {_line(error)}"
        ) from error
    finally:
        if with_bar:
            logging.enable_progress_bar()
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:  # Transformers fills them with random numbers
        raise ModelLoadError(
            f"model: {short_repr(directory.name)} lacks weights that the model has: "
            f"{', '.join(missing[:_MISSING_SHOWN])}"
            + (f" and {more} more" if (more := len(missing) - _MISSING_SHOWN) > 0 else "")
        )
    return model


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _eos_ids(model: Any, vocab: int) -> frozenset[int]:
    for source in (getattr(model, "generation_config", None), model.config.get_text_config()):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            return frozenset(int(token) for token in values if 0 <= int(token) < vocab)
    return frozenset()
