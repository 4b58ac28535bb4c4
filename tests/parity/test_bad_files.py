"""Files that cannot be served are refused when they are loaded, with a typed error that helps.

No Transformers here: the reference is the message.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
from engine_driver import Driver, Part
from tiny_gguf import TinyLlama, write_gguf

import pocket_cpp_core as native

pytestmark = pytest.mark.parity


def load(path, **options):
    return native.Engine(path, num_blocks=4, threads=1, **options)


def write(tmp_path, model=TinyLlama(), **kw):  # noqa: B008  (frozen)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, **kw)
    return path


def without(name):
    return lambda weights: {key: value for key, value in weights.items() if key != name}


def replaced(name, shape):
    def change(weights):
        return weights | {name: np.zeros(shape, dtype=np.float32)}

    return change


def test_the_tiny_model_loads(tmp_path):
    """Otherwise the refusals below would prove nothing."""
    info = load(write(tmp_path)).model_info
    assert info["architecture"] == "llama"
    assert info["vocab"] == TinyLlama().vocab


@pytest.mark.parametrize("keep", [0, 3, 4, 20, 300, 0.5, 0.9, -1])
def test_truncated(tmp_path, keep):
    path = write(tmp_path)
    data = path.read_bytes()
    size = int(keep * len(data)) if isinstance(keep, float) else keep
    path.write_bytes(data[:size])
    with pytest.raises(native.ModelFileError) as caught:
        load(path)
    assert "model.gguf" in str(caught.value)
    assert caught.value.code == "bad_file"


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(native.ModelFileError, match=r"nothing\.gguf"):
        load(tmp_path / "nothing.gguf")
    with pytest.raises(native.ModelFileError):
        load(tmp_path)


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("<html>404</html>" * 100)
    with pytest.raises(native.ModelFileError, match=r"text\.gguf"):
        load(path)


def test_unknown_architecture(tmp_path):
    path = write(tmp_path, TinyLlama(architecture="mamba9"))
    with pytest.raises(native.Unsupported, match=r"mamba9.*supported: llama, gemma3") as caught:
        load(path)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight", "blk.0.ffn_down.weight"],
)
def test_missing_tensor(tmp_path, name):
    path = write(tmp_path, change_tensors=without(name))
    with pytest.raises(native.ModelFileError, match=name):
        load(path)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blk.1.attn_q.weight", (64, 96), r"\[64, 96\].*expected \[64, 64\]"),
        ("blk.0.attn_k.weight", (64, 64), r"\[64, 64\].*expected \[32, 64\]"),
        ("blk.0.ffn_norm.weight", (65,), r"\[65\].*expected \[64\]"),
        ("output_norm.weight", (8, 8), r"\[8, 8\].*expected \[64\]"),
        ("token_embd.weight", (334, 64), r"vocab_size is 333.*334 rows"),
    ],
)
def test_ill_shaped_tensor(tmp_path, name, shape, expected):
    path = write(tmp_path, change_tensors=replaced(name, shape))
    with pytest.raises(native.ModelFileError, match=expected):
        load(path)


def test_tensor_of_an_unknown_type(tmp_path):
    """The type id of one tensor is overwritten with 250 in the file's tensor table."""
    path = write(tmp_path)
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    dimensions = struct.unpack_from("<I", data, at)[0]
    struct.pack_into("<I", data, at + 4 + 8 * dimensions, 250)
    path.write_bytes(bytes(data))
    with pytest.raises(native.Unsupported, match=r"blk\.0\.attn_q\.weight.*250"):
        load(path)


def test_a_tensor_that_the_model_would_ignore(tmp_path):
    """An attention bias: computing without it would give wrong text, not an error."""
    path = write(tmp_path, change_tensors=lambda w: w | {"blk.0.attn_q.bias": np.ones(64, "f4")})
    with pytest.raises(native.Unsupported, match=r"blk\.0\.attn_q\.bias"):
        load(path)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            TinyLlama(rope_scaling="longrope"),
            native.Unsupported,
            "rope.scaling.type.*longrope.*yarn",
        ),
        (
            TinyLlama(rope_scaling="yarn"),
            native.ModelFileError,
            "original_context_length is missing",
        ),
        (
            TinyLlama(extra={"expert_count": 8}),
            native.ModelFileError,
            "expert_used_count is missing",
        ),
        (
            TinyLlama(architecture="qwen2", extra={"expert_count": 8}),
            native.Unsupported,
            "mixtures of experts of a qwen2 model are not supported",
        ),
        (TinyLlama(extra={"attention.value_length": 32}), native.Unsupported, "value_length"),
        (TinyLlama(head_dim=24), native.Unsupported, "head dimension: got 24.*multiple of 16"),
        (TinyLlama(head_dim=272), native.Unsupported, "head dimension: got 272.*at most 256"),
        (TinyLlama(ffn=100), native.Unsupported, "feed_forward_length: got 100.*multiple of 32"),
        (TinyLlama(hidden=80), native.Unsupported, "embedding_length: got 80.*multiple of 32"),
        (TinyLlama(extra={"block_count": 0}), native.ModelFileError, "block_count: got 0"),
        (TinyLlama(extra={"block_count": 3}), native.ModelFileError, "blk.2"),
        (TinyLlama(extra={"block_count": 1}), native.Unsupported, "blk.1"),
        (TinyLlama(extra={"attention.head_count_kv": 3}), native.ModelFileError, "head_count_kv"),
        (TinyLlama(extra={"context_length": 2**31}), native.ModelFileError, "context_length"),
        (TinyLlama(extra={"rope.freq_base": -1.0}), native.ModelFileError, "rope.freq_base"),
        (TinyLlama(extra={"rope.dimension_count": 64}), native.ModelFileError, "dimension_count"),
        (TinyLlama(rope_frequency_factors=(1.0,)), native.ModelFileError, "rope_freqs.*8 elements"),
        (TinyLlama(extra={"block_count": "two"}), native.ModelFileError, "block_count"),
    ],
)
def test_hyper_parameters(tmp_path, model, error, message):
    path = write(tmp_path, model)
    with pytest.raises(error, match=message):
        load(path)


def test_options_beyond_the_model(tmp_path):
    path = write(tmp_path)
    with pytest.raises(native.InvalidArgument, match=r"max_context: got 513.*512"):
        load(path, max_context=513)
    with pytest.raises(native.InvalidArgument, match="max_sequences"):
        load(path, max_sequences=0)
    with pytest.raises(native.Unsupported, match=r"kv_dtype.*fp8"):
        load(path, kv_dtype="fp8")
    with pytest.raises(native.Unsupported, match=r"precision.*bf16"):
        load(path, precision="bf16")
    with pytest.raises(native.InvalidArgument, match="sse2"):
        load(path, isa="sse2")


def test_a_refused_load_leaves_the_engine_loadable(tmp_path):
    """Errors after errors: no state is left behind."""
    good = write(tmp_path)
    bad = tmp_path / "bad.gguf"
    write_gguf(bad, TinyLlama(), change_tensors=without("output_norm.weight"))
    for _ in range(3):
        with pytest.raises(native.ModelFileError):
            load(bad)
    assert np.isfinite(Driver(good).logits(Part([1, 2, 3], 0, 0))).all()
