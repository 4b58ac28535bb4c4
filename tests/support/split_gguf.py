"""Splits a GGUF file with the ``gguf`` package's own writer."""

from __future__ import annotations

from pathlib import Path

import gguf


def split_gguf(source: Path, folder: Path, max_tensors: int, **kw: bool) -> list[Path]:
    """Write the same model in parts of at most ``max_tensors`` tensors; returns them in order.

    Args:
        kw: further arguments of ``GGUFWriter``, such as ``small_first_shard``.
    """
    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(
        str(folder / source.name), architecture, split_max_tensors=max_tensors, **kw
    )
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"{source.stem}-*.gguf"))
