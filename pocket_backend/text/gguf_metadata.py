"""Reader of a GGUF file's key/values and tensor descriptions (not of tensor data).

The file is mapped and scanned once: every count and length is checked against the bytes that are
left before it is used, and values are decoded only when asked for, so that a vocabulary nobody
wants costs a walk over its lengths. Little-endian GGUF versions 2 and 3.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar, cast

from pocket_backend.api.errors import ModelLoadError, short_repr

MAX_KEY_BYTES = 65535
"""The format's own limit."""
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4
"""Arrays of arrays are legal; no known file nests them, so a deep one is an attack."""
_MIN_KV_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_SIZES = {kind: struct.calcsize("<" + code) for kind, code in _SCALARS.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_T = TypeVar("_T")

GGML_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's description. ``shape`` in GGUF order: the contiguous dimension first."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    """Bytes from the start of the tensor data."""

    @property
    def type_name(self) -> str:
        return GGML_TYPE_NAMES.get(self.type_id, f"type {self.type_id}")


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: int
    offset: int
    """Of the value; of the first element for an array."""
    item_kind: int = -1
    count: int = 0


class GgufMetadata:
    """Key/values by name, decoded on access; use it as a context manager or ``close`` it.

    Raises:
        ModelLoadError: the file is missing, not GGUF, truncated or inconsistent; names the file and
            the key. Also on access, if a value has another type than the caller needs.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        self._size = len(self._map)
        try:
            self._scan()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def array_length(self, key: str) -> int | None:
        """Number of elements of an array, without decoding it; None if it is no array."""
        entry = self._entries.get(key)
        return entry.count if entry is not None and entry.kind == _ARRAY else None

    def get(self, key: str) -> object:
        """The value: int, float, bool, str, or a list of one of these; None if absent."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.kind == _ARRAY:
            return self._array(key, entry)
        if entry.kind == _STRING:
            return self._string(entry.offset, key)[0]
        value: object = struct.unpack_from("<" + _SCALARS[entry.kind], self._map, entry.offset)[0]
        return value

    def get_str(self, key: str) -> str | None:
        return self._typed(key, str, "a string")

    def get_bool(self, key: str) -> bool | None:
        return self._typed(key, bool, "a boolean")

    def get_int(self, key: str) -> int | None:
        value = self._typed(key, int, "an integer")
        if isinstance(value, bool):
            self._fail(f"{key}: is a boolean, must be an integer")
        return value

    def get_strings(self, key: str) -> list[str] | None:
        return cast("list[str] | None", self._items(key, _STRING, "strings"))

    def get_floats(self, key: str) -> list[float] | None:
        return cast("list[float] | None", self._items(key, 6, "32-bit floats"))

    def get_ints(self, key: str) -> list[int] | None:
        entry = self._entries.get(key)
        if entry is not None and entry.item_kind in (6, 12, _BOOL, _STRING, _ARRAY):
            self._fail(f"{key}: must be an array of integers")
        kind = -1 if entry is None else entry.item_kind
        return cast("list[int] | None", self._items(key, kind, "integers"))

    def _typed(self, key: str, kind: type[_T], name: str) -> _T | None:
        value = self.get(key)
        if value is not None and not isinstance(value, kind):
            self._fail(f"{key}: is {short_repr(value)}, must be {name}")
        return value

    def _items(self, key: str, item_kind: int, name: str) -> list[object] | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.kind != _ARRAY or entry.item_kind != item_kind:
            self._fail(f"{key}: must be an array of {name}")
        return self._array(key, entry)

    def _array(self, key: str, entry: _Entry) -> list[object]:
        if entry.item_kind == _ARRAY:
            self._fail(f"{key}: arrays of arrays are not supported")
        if entry.item_kind == _STRING:
            return self._strings(key, entry)
        layout = f"<{entry.count}{_SCALARS[entry.item_kind]}"
        return list(struct.unpack_from(layout, self._map, entry.offset))

    def _strings(self, key: str, entry: _Entry) -> list[object]:
        data, offset, unpack = self._map, entry.offset, _U64.unpack_from
        items: list[object] = []
        try:
            for _ in range(entry.count):
                (length,) = unpack(data, offset)
                offset += 8
                items.append(str(data[offset : offset + length], "utf-8"))
                offset += length
        except UnicodeDecodeError:
            self._fail(f"{key}[{len(items)}]: is not UTF-8")
        return items

    def _scan(self) -> None:
        if self._size < 24 or self._map[:4] != b"GGUF":
            self._fail("is not a GGUF file (no GGUF header)")
        (self.version,) = _U32.unpack_from(self._map, 4)
        if self.version not in (2, 3):
            swapped = int.from_bytes(self._map[4:8], "big") in (2, 3)
            self._fail(
                "is big-endian; only little-endian GGUF is supported"
                if swapped
                else f"has GGUF version {self.version}; 2 and 3 are supported"
            )
        (tensor_count,) = _U64.unpack_from(self._map, 8)
        (kv_count,) = _U64.unpack_from(self._map, 16)
        offset = 24
        self._check_count(kv_count, _MIN_KV_BYTES, offset, "the header", "key/values")
        self._entries: dict[str, _Entry] = {}
        for index in range(kv_count):
            offset = self._scan_entry(offset, index)
        self._check_count(tensor_count, _MIN_TENSOR_BYTES, offset, "the header", "tensors")
        self.tensor_count: int = tensor_count
        self._tensors_offset = offset

    def _scan_entry(self, offset: int, index: int) -> int:
        where = f"key {index}"
        key, offset = self._string(offset, where, MAX_KEY_BYTES)
        if key in self._entries:
            self._fail(f"{key}: occurs twice")
        (kind,) = self._unpack(_U32, offset, key)
        offset += 4
        if kind == _ARRAY:
            entry, end = self._scan_array(offset, key, 1)
        else:
            entry, end = _Entry(kind, offset), self._skip(offset, kind, key)
        self._entries[key] = entry
        return end

    def _scan_array(self, offset: int, key: str, depth: int) -> tuple[_Entry, int]:
        (item_kind,) = self._unpack(_U32, offset, key)
        (count,) = self._unpack(_U64, offset + 4, key)
        offset += 12
        entry = _Entry(_ARRAY, offset, item_kind, count)
        if item_kind in _SIZES:
            self._check_count(count, _SIZES[item_kind], offset, key, "elements")
            return entry, offset + count * _SIZES[item_kind]
        if item_kind == _STRING:
            self._check_count(count, 8, offset, key, "elements")
            return entry, self._skip_strings(offset, count, key)
        if item_kind != _ARRAY:
            self._fail(f"{key}: has elements of unknown type {item_kind}")
        if depth == MAX_ARRAY_DEPTH:
            self._fail(f"{key}: arrays are nested more than {MAX_ARRAY_DEPTH} deep")
        self._check_count(count, 12, offset, key, "elements")
        for _ in range(count):
            _, offset = self._scan_array(offset, key, depth + 1)
        return entry, offset

    def _skip_strings(self, offset: int, count: int, key: str) -> int:
        data, size, unpack = self._map, self._size, _U64.unpack_from
        for index in range(count):
            if offset > size - 8:
                self._fail(f"{key}[{index}]: the file ends in it ({size} bytes)")
            offset += 8 + unpack(data, offset)[0]
        if offset > size:
            self._fail(f"{key}: the file ends in it ({size} bytes)")
        return offset

    def _skip(self, offset: int, kind: int, key: str) -> int:
        if kind == _STRING:
            (length,) = self._unpack(_U64, offset, key)
            end = offset + 8 + length
        elif kind in _SIZES:
            end = offset + _SIZES[kind]
        else:
            self._fail(f"{key}: has unknown type {kind}")
        if end > self._size:
            self._fail(f"{key}: the file ends in it ({self._size} bytes)")
        return int(end)

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Descriptions of all tensors, in file order."""
        offset = self._tensors_offset
        infos: list[TensorInfo] = []
        for index in range(self.tensor_count):
            where = f"tensor {index}"
            name, offset = self._string(offset, where, MAX_KEY_BYTES)
            (rank,) = self._unpack(_U32, offset, where)
            if not 0 < rank <= MAX_DIMENSIONS:
                self._fail(f"tensor {name}: has {rank} dimensions, 1 to {MAX_DIMENSIONS} are legal")
            layout = struct.Struct(f"<{rank}QIQ")
            *shape, type_id, start = self._unpack(layout, offset + 4, where)
            offset += 4 + layout.size
            infos.append(TensorInfo(name, tuple(shape), type_id, start))
        return tuple(infos)

    def _string(self, offset: int, where: str, limit: int | None = None) -> tuple[str, int]:
        (length,) = self._unpack(_U64, offset, where)
        offset += 8
        if length > self._size - offset or (limit is not None and length > limit):
            self._fail(
                f"{where}: states a string of {length} bytes, {self._size - offset} are left"
            )
        try:
            return str(self._map[offset : offset + length], "utf-8"), offset + length
        except UnicodeDecodeError:
            self._fail(f"{where}: is not UTF-8")

    def _unpack(self, layout: struct.Struct, offset: int, where: str) -> tuple[int, ...]:
        if offset > self._size - layout.size:
            self._fail(f"{where}: the file ends in it ({self._size} bytes)")
        return layout.unpack_from(self._map, offset)

    def _check_count(self, count: int, item: int, offset: int, where: str, what: str) -> None:
        if count > (self._size - offset) // item:
            self._fail(f"{where}: states {count} {what}, more than fit into the file")

    def _fail(self, message: str) -> NoReturn:
        raise ModelLoadError(f"{self.path}: {message}")


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelLoadError(f"{path}: is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
