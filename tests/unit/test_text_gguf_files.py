"""Which GGUF files are one model, and what is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from pocket_backend.api import ModelLoadError
from pocket_backend.text.gguf_files import (
    PartName,
    gguf_model_file,
    gguf_models,
    gguf_parts,
    only_gguf_model,
    part_name,
    read_parts,
)


def write(path: Path, *tensors: str, **split: int) -> Path:
    """A file of 16-byte tensors with the split.* keys of ``split``."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in split.items():
        writer.add_uint32("split." + key.replace("_", "."), value)
    for name in tensors:
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_parts(folder: Path, stem: str = "m") -> list[Path]:
    names = [("a", "b"), (), ("c",)]
    return [
        write(
            folder / f"{stem}-{number:05}-of-00003.gguf",
            *tensors,
            no=number - 1,
            count=3,
            tensors_count=3,
        )
        for number, tensors in enumerate(names, 1)
    ]


def test_names() -> None:
    assert part_name(Path("x/a-b-00002-of-00010.gguf")) == PartName("a-b", 2, 10)
    assert PartName("a-b", 2, 10).sibling(3) == "a-b-00003-of-00010.gguf"
    for other in (
        "a.gguf",
        "a-0002-of-00010.gguf",
        "a-00011-of-00010.gguf",
        "a-00000-of-00010.gguf",
        "-00001-of-00002.gguf",
        "a-00001-of-00002.ggufx",
    ):
        assert part_name(Path(other)) is None


def test_models_of_a_directory(tmp_path: Path) -> None:
    assert gguf_models(tmp_path) == []
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor a GGUF file"):
        only_gguf_model(tmp_path)
    parts = write_parts(tmp_path)
    assert gguf_models(tmp_path) == [parts[0]]
    assert gguf_model_file(tmp_path) == parts[0]
    parts[0].unlink()  # still one model, whose absence is reported when it is opened
    assert only_gguf_model(tmp_path) == parts[0]
    with pytest.raises(ModelLoadError, match="part 1 of 3; the model has 3 tensors, the 2 parts"):
        gguf_parts(only_gguf_model(tmp_path))
    write(tmp_path / "other.gguf", "a")
    with pytest.raises(
        ModelLoadError, match=r"holds 2 GGUF models \(m-00001-of-00003.gguf, other.gguf\); name one"
    ):
        gguf_model_file(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert gguf_model_file(tmp_path) == tmp_path
    assert gguf_model_file(tmp_path / "other.gguf") == tmp_path / "other.gguf"


def test_parts(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    assert gguf_parts(parts[0]) == tuple(parts)
    assert [info.name for info in read_parts(tuple(parts))] == ["a", "b", "c"]
    single = write(tmp_path / "single.gguf", "a")
    assert gguf_parts(single) == (single,)
    assert len(read_parts((single,))) == 1
    one = write(tmp_path / "n-00001-of-00001.gguf", "a")
    assert gguf_parts(one) == (one,)
    with pytest.raises(ModelLoadError, match=r"is part 2 of 3 .* m-00001-of-00003.gguf"):
        gguf_parts(parts[1])
    size = sum(parts[i].stat().st_size for i in (0,))
    parts[1].unlink()
    parts[2].unlink()
    with pytest.raises(
        ModelLoadError,
        match=rf"{parts[1]}: the file is missing: part 2 of 3 \(and 1 more\); the model has 3 "
        rf"tensors, the 1 parts here hold 2 in files of {size} bytes",
    ):
        gguf_parts(parts[0])


@pytest.mark.parametrize(
    ("tensors", "split", "message"),
    [
        (("c",), {"no": 1, "count": 3}, "says part 3 of 3, but its key split.no is 1, not 2"),
        (("c",), {"no": 2, "count": 4}, "split.count is 4, not 3"),
        (("c",), {"no": 2, "count": 3, "tensors_count": 9}, "split.tensors.count is 9, not 3"),
        (("c",), {}, "its key split.no is missing"),
        (("a",), {"no": 2, "count": 3}, "tensor 'a': is in m-00001-of-00003.gguf as well"),
        ((), {"no": 2, "count": 3}, "split.tensors.count is 3, but the 3 parts here hold 2"),
    ],
)
def test_parts_that_do_not_belong_together(
    tmp_path: Path, tensors: tuple[str, ...], split: dict[str, int], message: str
) -> None:
    parts = write_parts(tmp_path)
    write(parts[2], *tensors, **split)
    with pytest.raises(ModelLoadError, match=message):
        read_parts(tuple(parts))


def test_a_renamed_part(tmp_path: Path) -> None:
    renamed = write_parts(tmp_path)[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelLoadError, match=r"a model of 3 files .*-00001-of-00003.gguf"):
        read_parts(gguf_parts(renamed))


def test_the_first_part_must_count_the_tensors(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    write(parts[0], "a", "b", no=0, count=3)
    with pytest.raises(ModelLoadError, match=r"its key split\.tensors\.count is missing"):
        read_parts(tuple(parts))
