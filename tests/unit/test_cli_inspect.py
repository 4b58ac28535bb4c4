"""`pocketllm inspect`: what headers say, what it refuses, and that its memory is the engine's."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from split_gguf import split_gguf
from tiny_gguf import TinyLlama, write_gguf

from pocket_backend.api import EngineArgs, ModelLoadError
from pocket_backend.cli.inspect import judge
from pocket_backend.cli.main import main
from pocket_backend.executors.cpp_engine import CppEngineBackend
from pocket_backend.executors.gguf_description import BLOCK_SIZES
from pocket_backend.executors.model_description import Shape, describe_model
from pocket_backend.text.gguf_metadata import GGML_TYPE_NAMES

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 128,
}


def inspected(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["inspect", "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def checkpoint(directory: Path, **changes: object) -> Path:
    """A safetensors directory of two shards."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file({"a": np.zeros((32, 8), np.float32)}, directory / "one.safetensors")
    save_file(
        {"b": np.zeros((3, 4), np.float16), "c": np.zeros(5, np.float16)},
        directory / "two.safetensors",
    )
    shards = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return directory


def test_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.gguf"
    model = TinyLlama(weight_format="Q8_0", ffn=64, tokenizer_tokens=333)
    weights = write_gguf(file, model)
    found = inspected(capsys, str(file))
    assert found["container"] == "GGUF v3"
    assert found["architecture"] == "llama"
    assert found["parameters"] == sum(array.size for array in weights.values())
    assert found["tensors"] == len(weights)
    with file.open("rb") as opened:
        reader = gguf.GGUFReader(opened.name)
    assert found["memory_bytes"]["weights"] == sum(int(t.n_bytes) for t in reader.tensors)
    assert {item["name"] for item in found["formats"]} == {"Q8_0", "F32"}
    assert found["shape"]["kv_heads"] == [model.kv_heads]
    assert found["tokenizer"] == {"kind": "BPE", "tokens": 333, "chat_template": False}
    assert found["serving"]["backend"] == "cpp"


@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16", "f32", "int8"])
def test_kv_memory_is_what_the_engine_allocates(
    kv_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, TinyLlama())
    argv = (str(file), "-c", "64", "-b", "3", "--kv-cache-dtype", kv_dtype)
    memory = inspected(capsys, *argv)["memory_bytes"]
    options = {"kv_cache_dtype": kv_dtype, "kv_cache_tokens": 3 * 64}
    with contextlib.closing(CppEngineBackend(file, options)) as backend:
        assert memory["kv"] == backend.get_memory_info().kv_cache_bytes
    assert memory["total"] == memory["weights"] + memory["kv"] + memory["process"]


def test_a_split_gguf_counts_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = tmp_path / "m.gguf"
    whole = write_gguf(single, TinyLlama(tokenizer_tokens=333))
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = split_gguf(single, folder, max_tensors=8)
    expected = inspected(capsys, str(single))
    for path in (parts[0], folder):
        found = inspected(capsys, str(path))
        assert found["files"] == 3
        assert found["parameters"] == sum(array.size for array in whole.values())
        assert found["serving"]["backend"] == "cpp"
        for key in ("architecture", "formats", "shape", "tokenizer"):
            assert found[key] == expected[key]
        assert found["memory_bytes"]["weights"] == expected["memory_bytes"]["weights"]
    with pytest.raises(ModelLoadError, match="is part 2 of 3 of a model; give the first one"):
        describe_model(parts[1])
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00003\.gguf: the file is missing"):
        describe_model(parts[0])


def test_a_checkpoint_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = checkpoint(tmp_path / "m", text_config={"vocab_size": 40})
    vocabulary = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}}
    vocabulary["added_tokens"] = [{"id": 1, "content": "b"}, {"id": 2, "content": "<s>"}]
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary))
    (directory / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    found = inspected(capsys, str(directory), "--template")
    assert found["architecture"] == "LlamaForCausalLM"
    assert (found["container"], found["files"]) == ("safetensors", 2)
    assert found["formats"] == [
        {"name": "F32", "tensors": 1, "parameters": 256, "bytes": 1024},
        {"name": "F16", "tensors": 2, "parameters": 17, "bytes": 34},
    ]
    assert found["shape"]["vocab"] == 40  # of the text model inside a multimodal one
    assert found["shape"]["head_dim"] == 2
    assert found["memory_bytes"]["kv_per_token"] == 2 * 3 * 2 * 2 * 2
    assert found["tokenizer"] == {"kind": "BPE", "tokens": 3, "chat_template": "{{ messages }}"}


def damage(directory: Path, what: str) -> None:
    shard, index = directory / "two.safetensors", directory / "model.safetensors.index.json"
    match what:
        case "missing shard":
            shard.unlink()
        case "cut off":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "not safetensors":
            shard.write_bytes(b"x" * 40)
        case "no json":
            shard.write_bytes((5).to_bytes(8, "little") + b"{nope")
        case "undescribed":
            shard.write_bytes((14).to_bytes(8, "little") + b'{"a": {"x":1}}')
        case "elsewhere":
            index.write_text('{"weight_map": {"a": "../one.safetensors"}}')
        case "no weights":
            for file in (*directory.glob("*.safetensors"), index):
                file.unlink()
        case "bad config":
            (directory / "config.json").write_text("[]")
        case "no config":
            (directory / "config.json").unlink()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing shard", "two.safetensors is missing"),
        ("cut off", r"tensor '.': ends at byte \d+ of \d+ that are there"),
        ("not safetensors", "is not a safetensors file, or is cut off"),
        ("no json", "its header is not JSON"),
        ("undescribed", "tensor 'a': is not described"),
        ("elsewhere", "'../one.safetensors' is not a file name"),
        ("no weights", "has config.json, but no"),
        ("bad config", "must hold a JSON object"),
        ("no config", "neither a GGUF file nor config.json"),
    ],
)
def test_damaged_checkpoints(what: str, message: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "m")
    damage(directory, what)
    with pytest.raises(ModelLoadError, match=message):
        describe_model(directory)


def test_other_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/nowhere"]) == 3
    assert "error: model: /nowhere does not exist" in capsys.readouterr().err
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, TinyLlama(layers=1))
    with pytest.raises(ModelLoadError, match=r"2 GGUF models \(a.gguf, b.gguf\); name one"):
        describe_model(tmp_path)
    assert main(["inspect", str(tmp_path / "a.gguf"), "-b", "0"]) == 2


def test_why_a_model_is_not_served(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, TinyLlama(architecture="mystery"))
    verdict = judge(EngineArgs(model=str(file), backend="cpp"))
    assert verdict.backend is None
    assert "mystery" in verdict.reason


def test_text_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, TinyLlama())
    assert main(["inspect", str(file)]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["architecture"] == "llama"
    assert rows["memory"].startswith("about 150.")
    assert rows["tokenizer"] == "none in these files"
    assert "served" in rows


def test_kv_size_with_heads_by_layer() -> None:
    assert Shape(layers=3, kv_heads=(1, 2, 4), head_dim=8).kv_bytes_per_token(2) == 2 * 7 * 8 * 2
    assert Shape(layers=3, kv_heads=(2,), head_dim=8).kv_bytes_per_token(2) == 2 * 6 * 8 * 2
    assert Shape(layers=3).kv_bytes_per_token(2) is None


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    sizes = {kind.name: tuple(size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert set(BLOCK_SIZES) == set(GGML_TYPE_NAMES.values())
    for name, size in BLOCK_SIZES.items():
        assert sizes[name] == size, name


def test_nothing_heavy_is_loaded_for_a_checkpoint(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "m")
    code = (
        "import sys; from pocket_backend.executors.model_description import describe_model\n"
        f"describe_model({str(directory)!r})\n"
        "heavy = {'torch', 'numpy', 'pocket_cpp_core'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
