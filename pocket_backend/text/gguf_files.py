"""Which files make a GGUF model: one, or the parts of a split one.

Parts are named ``STEM-00001-of-00003.gguf``; the first holds the metadata and stands for the model.
Each says which part it is (``split.no``, from 0) and of how many (``split.count``), and how many
tensors the model has (``split.tensors.count``). The C++ engine checks the same and, since it looks
at the tensors' bytes, more (``pocket/io/gguf_model.h``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pocket_backend.api.errors import ModelLoadError
from pocket_backend.text.gguf_metadata import GgufMetadata, TensorInfo

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PartName:
    """What the name of a part says."""

    stem: str
    number: int
    """From 1."""
    count: int

    def sibling(self, number: int) -> str:
        """The name of another part of the model."""
        return f"{self.stem}-{number:05}-of-{self.count:05}.gguf"


def part_name(file: Path) -> PartName | None:
    """None if it is not the name of a part."""
    found = _PART.fullmatch(file.name)
    if found is None:
        return None
    name = PartName(found.group(1), int(found.group(2)), int(found.group(3)))
    return name if 1 <= name.number <= name.count else None


def gguf_models(directory: Path) -> list[Path]:
    """The GGUF models of a directory by name, a split one as its first part, whether or not that
    is there."""
    models = set()
    for file in directory.glob("*.gguf"):
        name = part_name(file)
        models.add(file if name is None else file.with_name(name.sibling(1)))
    return sorted(models)


def only_gguf_model(directory: Path) -> Path:
    """The one GGUF model that a directory holds.

    Raises:
        ModelLoadError: it holds none or several; names them.
    """
    found = gguf_models(directory)
    if not found:
        raise ModelLoadError(
            f"model: the directory {directory} holds neither config.json nor a GGUF file; give a "
            "GGUF file or a Hugging Face directory"
        )
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4]) + ", ..." * (len(found) > 4)
        raise ModelLoadError(
            f"model: {directory} holds {len(found)} GGUF models ({names}); name one of them"
        )
    return found[0]


def gguf_model_file(path: Path) -> Path:
    """``path``, or for a directory without ``config.json`` the one GGUF model in it.

    Raises:
        ModelLoadError: as ``only_gguf_model``.
    """
    if not path.is_dir() or (path / "config.json").is_file():
        return path
    return only_gguf_model(path)


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The files of the model at ``path``: itself, or all parts if it is the first of several.

    Raises:
        ModelLoadError: it is another part, or parts are missing; says what the others hold.
    """
    name = part_name(path)
    if name is None:
        return (path,)
    if name.number != 1:
        raise ModelLoadError(
            f"{path}: is part {name.number} of {name.count} of a model; give the first one, "
            f"{name.sibling(1)}"
        )
    files = tuple(path.with_name(name.sibling(i)) for i in range(1, name.count + 1))
    missing = [number for number, file in enumerate(files, 1) if not file.is_file()]
    if missing:
        _fail_missing(name, files, missing)
    return files


def read_parts(files: tuple[Path, ...]) -> tuple[TensorInfo, ...]:
    """Descriptions of all tensors of a model, from the headers of its files.

    Raises:
        ModelLoadError: as ``GgufMetadata``; also if the parts do not belong together: their keys
            disagree, or tensors are missing or twice there.
    """
    tensors: list[TensorInfo] = []
    owners: dict[str, Path] = {}
    expected: int | None = None
    for number, file in enumerate(files, 1):
        with GgufMetadata(file) as part:
            if len(files) > 1:
                expected = _check_part(part, number, len(files), expected)
            elif (count := part.get_int("split.count") or 1) > 1 and part_name(file) is None:
                raise ModelLoadError(
                    f"{file}: is a part of a model of {count} files (split.count); its name must "
                    f"end like -00001-of-{count:05}.gguf"
                )
            found = part.tensors()
        for info in found:
            if len(files) > 1 and info.name in owners:
                raise ModelLoadError(
                    f"{file}: tensor {info.name!r}: is in {owners[info.name].name} as well"
                )
            owners[info.name] = file
        tensors += found
    if expected is not None and len(tensors) != expected:
        raise ModelLoadError(
            f"{files[0]}: split.tensors.count is {expected}, but the {len(files)} parts here hold "
            f"{len(tensors)} tensors"
        )
    return tuple(tensors)


def _check_part(part: GgufMetadata, number: int, count: int, tensors: int | None) -> int:
    """The stated number of tensors, which must be ``tensors`` unless this part is the first."""
    wanted: Mapping[str, int | None] = {
        "split.no": number - 1,
        "split.count": count,
        "split.tensors.count": tensors,
    }
    found = {key: part.get_int(key) for key in wanted}
    stated = found["split.tensors.count"]
    for key, value in found.items():
        expected = wanted[key]
        if value is None and (key != "split.tensors.count" or tensors is None):
            raise ModelLoadError(
                f"{part.path}: its name says part {number} of {count}, but its key {key} is missing"
            )
        if value is not None and expected is not None and value != expected:
            raise ModelLoadError(
                f"{part.path}: its name says part {number} of {count}, but its key {key} is "
                f"{value}, not {expected}"
            )
    return stated if tensors is None and stated is not None else tensors or 0


def _fail_missing(name: PartName, files: tuple[Path, ...], missing: list[int]) -> NoReturn:
    present = [file for file in files if file.is_file()]
    others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    stated, held, size = None, 0, 0
    for file in present:
        with GgufMetadata(file) as part:
            stated = stated if stated is not None else part.get_int("split.tensors.count")
            held += part.tensor_count
        size += file.stat().st_size
    raise ModelLoadError(
        f"{files[missing[0] - 1]}: the file is missing: part {missing[0]} of {name.count}{others}; "
        f"the model has {'?' if stated is None else stated} tensors, the {len(present)} parts here "
        f"hold {held} in files of {size} bytes"
    )
