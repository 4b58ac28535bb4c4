"""Quantised checkpoints on the PyTorch backend: what is read, and what is said when it is not.

Most methods need packages that are not installed here, so for them a directory is its config.json:
the error has to come before any weight is looked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import Checkpoint, write_checkpoint
from tiny_hf import edit_config

from pocket_backend.api import (
    BackendUnavailableError,
    ModelLoadError,
    PocketLLMError,
    SamplingParams,
)
from pocket_backend.engine.llm import LLM
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors import torch_quantisation
from pocket_backend.executors.torch_engine import PyTorchBackend
from pocket_backend.executors.torch_quantisation import PACKAGES

pytestmark = pytest.mark.parity

BLOCK = 32
NEW = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def refusal(directory: Path, **config: object) -> PocketLLMError:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    with pytest.raises(PocketLLMError) as caught:
        PyTorchBackend(directory)
    return caught.value


@pytest.mark.parametrize("method", sorted(PACKAGES))
def test_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(torch_quantisation, "_is_installed", lambda module: module == "optimum")
    error = refusal(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    assert isinstance(error, BackendUnavailableError)
    assert f"quantised ({method})" in str(error)
    for package in PACKAGES[method]:
        assert (package in str(error)) == (package != "optimum")


def test_what_is_looked_for_is_not_here() -> None:
    """Else the test above says nothing about a user's machine."""
    assert torch_quantisation._is_installed("torch")
    assert not torch_quantisation._is_installed("no_such_module")
    assert not torch_quantisation._is_installed("no_such_module.inner")


def test_every_method_of_transformers_is_thought_of() -> None:
    """One that a new version adds has to be looked at: does it need a package?"""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    needs_none = {"bitnet", "fp8", "gemma", "gguf", "metal", "mxfp4", "mxfp8", "nvfp4"}
    assert set(AUTO_QUANTIZATION_CONFIG_MAPPING) - needs_none == set(PACKAGES) - {"bitsandbytes"}


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_by_its_older_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, nested: bool
) -> None:
    monkeypatch.setattr(torch_quantisation, "_is_installed", lambda _: False)
    quantised = {"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 6.0}}
    error = refusal(tmp_path, **({"text_config": quantised} if nested else quantised))
    assert isinstance(error, BackendUnavailableError)
    assert "(bitsandbytes_8bit) and Transformers needs the package bitsandbytes" in str(error)


def test_methods_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    """Transformers would take the packed numbers for weights."""
    error = refusal(tmp_path, quantization_config={"quant_method": "origami"})
    assert isinstance(error, ModelLoadError)
    assert "quantised by 'origami', which Transformers does not know" in str(error)
    error = refusal(tmp_path, quantization_config={"bits": 4})
    assert "names no quant_method" in str(error)


def quantise_fp8(checkpoint: Checkpoint) -> None:
    """Rewrite the directory as a block-wise FP8 checkpoint, and round its model as that does."""
    file = checkpoint.path / "model.safetensors"
    weights = load_file(file)
    state = checkpoint.model.state_dict()
    for name in [n for n in weights if "_proj." in n]:
        weight = weights[name]
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        tiles = weight.view(rows, BLOCK, columns, BLOCK)
        scale = tiles.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        packed = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        weights[name] = packed.view(weight.shape)
        weights[name + "_scale_inv"] = scale
        state[name].copy_((packed.float() * scale[:, None, :, None]).view(weight.shape))
    save_file(weights, file, metadata={"format": "pt"})
    edit_config(
        checkpoint.path,
        quantization_config={
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    )


def test_fp8_is_read_without_any_package(tmp_path: Path) -> None:
    """On a CPU Transformers decodes it while it loads."""
    checkpoint = write_checkpoint(tmp_path, "llama", seed=4)
    before = checkpoint.greedy([5, 6, 7], NEW)
    quantise_fp8(checkpoint)
    expected = checkpoint.greedy([5, 6, 7], NEW)
    assert expected != before, "rounding to FP8 has to show"
    options = {"num_blocks": 8, "dtype": "float32", "device": "cpu"}
    engine = UnifiedEngine(PyTorchBackend(tmp_path, options), max_total_tokens=128)
    try:
        params = SamplingParams(max_tokens=NEW, ignore_eos=True)
        [result] = LLM(engine=engine).generate([[5, 6, 7]], params)
        assert list(result.token_ids) == expected
    finally:
        engine.close()


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """Transformers would make them up."""
    write_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    gone = [name for name in weights if "layers.1." in name]
    save_file({n: w for n, w in weights.items() if n not in gone}, file, metadata={"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"lacks weights that the model has: .*layers\.1\."
    ) as caught:
        PyTorchBackend(tmp_path)
    assert f"and {len(gone) - 4} more" in str(caught.value)
