"""The fuzzers' seeds of whole models are what they claim: those that should load do."""

from __future__ import annotations

from pathlib import Path

import pytest

from pocket_cpp_core import Engine, ModelFileError

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
MARK = b"\n--part--\n"
BROKEN = {"split_one_missing", "split_short"}
CHECKPOINT = ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json",
              "tokenizer_config.json")  # fmt: skip


def seeds(kind: str, suffix: str) -> list[Path]:
    return sorted((CORPUS / kind).glob(f"*.{suffix}"))


@pytest.mark.parametrize("seed", seeds("gguf_model", "gguf"), ids=lambda path: path.stem)
def test_gguf_models(seed: Path, tmp_path: Path) -> None:
    parts = seed.read_bytes().split(MARK)
    for number, part in enumerate(parts, 1):
        (tmp_path / f"m-{number:05}-of-{len(parts):05}.gguf").write_bytes(part)
    first = tmp_path / f"m-00001-of-{len(parts):05}.gguf"
    if seed.stem in BROKEN:
        with pytest.raises(ModelFileError):
            Engine(first, num_blocks=4)
    else:
        assert Engine(first, num_blocks=4).model_info["vocab"] == 8


@pytest.mark.parametrize("seed", seeds("checkpoint", "parts"), ids=lambda path: path.stem)
def test_checkpoints(seed: Path, tmp_path: Path) -> None:
    for name, part in zip(CHECKPOINT, seed.read_bytes().split(MARK), strict=True):
        (tmp_path / name).write_bytes(part)
    info = Engine(tmp_path, num_blocks=4).model_info
    assert info["vocab"] == 8
    assert info["eos_token_ids"] == [2, 3]


def test_there_is_one_of_each_kind() -> None:
    assert {path.stem for path in seeds("gguf_model", "gguf")} >= {
        "llama", "qwen2moe", "qwen3moe", "qwen35", "split", *BROKEN,
    }  # fmt: skip
    assert {path.stem for path in seeds("checkpoint", "parts")} >= {"llama", "gemma3", "qwen3_5"}
