"""Writes dequantize_vectors.inc: stored blocks and what `gguf.dequantize` makes of them.

Run from the repository root: python cpp_engine/tests/quant/make_vectors.py
The blocks have random codes and scales that cover both signs, zeros, subnormals, the largest half
and infinity, plus one row that went through gguf's own quantiser where it has one. Deterministic.
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize

QT = GGMLQuantizationType
# Byte offsets of the half-precision fields (scale, minimum) of a block.
SCALES = {
    QT.Q8_0: (0,),
    QT.Q4_0: (0,),
    QT.Q4_1: (0, 2),
    QT.Q5_0: (0,),
    QT.Q5_1: (0, 2),
    QT.IQ4_NL: (0,),
    QT.Q2_K: (80, 82),
    QT.Q3_K: (108,),
    QT.Q4_K: (0, 2),
    QT.Q5_K: (0, 2),
    QT.Q6_K: (208,),
    QT.IQ4_XS: (0,),
}
# Formats that gguf can quantise to.
QUANTISABLE = {QT.Q8_0, QT.Q4_0, QT.Q4_1, QT.Q5_0, QT.Q5_1}
SPECIAL_HALVES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0xBC01, 0x7BFF, 0xFBFF, 0x7C00]
# Blocks of 256 values: fewer of them keep the file readable.
SUPER_BLOCK_HALVES = [0x2E66, 0x83FF, 0x7BFF, 0x7C00]
SPECIAL_FLOATS = [0x00000000, 0x80000000, 0x00000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
HEADER = "// Written by make_vectors.py from gguf.dequantize; do not edit.\n// clang-format off\n"


def random_blocks(rng: np.random.Generator, qtype: QT) -> np.ndarray:
    elements, block_bytes = GGML_QUANT_SIZES[qtype]
    special = SPECIAL_HALVES if elements == 32 else SUPER_BLOCK_HALVES
    blocks = rng.integers(0, 256, (len(special), block_bytes), dtype=np.uint8)
    for field, offset in enumerate(SCALES[qtype]):
        halves = np.array(np.roll(special, 3 * field), dtype="<u2")
        blocks[:, offset : offset + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def stored_row(rng: np.random.Generator, qtype: QT) -> np.ndarray:
    if qtype in SCALES and qtype not in QUANTISABLE:
        return random_blocks(rng, qtype)
    if qtype in SCALES:
        real = quantize(rng.standard_normal(64, dtype=np.float32), qtype).reshape(-1)
        return np.concatenate([random_blocks(rng, qtype), real.view(np.uint8)])
    if qtype == QT.F32:
        return np.array(SPECIAL_FLOATS, dtype="<u4").view(np.uint8)
    halves = [*SPECIAL_HALVES, 0x1234, 0xC0DE, 0x7F7F, 0xFF80]
    return np.array(halves, dtype="<u2").view(np.uint8)


def expected_bits(stored: np.ndarray, qtype: QT) -> np.ndarray:
    if qtype == QT.F32:
        return stored.view("<u4")
    if qtype == QT.F16:
        values = stored.view(np.float16)
        return np.where(np.isnan(values), np.float32(np.nan), values.astype(np.float32)).view("<u4")
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(dequantize(stored, qtype)).view("<u4").reshape(-1)


def c_array(values: np.ndarray, per_line: int, digits: int) -> str:
    items = [f"0x{int(v):0{digits}x}" for v in values]
    lines = [", ".join(items[i : i + per_line]) for i in range(0, len(items), per_line)]
    return "{\n     " + ",\n     ".join(lines) + "}"


def main() -> None:
    rng = np.random.default_rng(20261129)
    out = [HEADER]
    for qtype in (QT.F32, QT.F16, QT.BF16, *SCALES):
        stored = stored_row(rng, qtype)
        arrays = (c_array(stored, 16, 2), c_array(expected_bits(stored, qtype), 8, 8))
        out.append(f"{{DType::k{qtype.name},\n    {arrays[0]},\n    {arrays[1]}}},\n")
    out.append("// clang-format on\n")
    Path(__file__).with_name("dequantize_vectors.inc").write_text("".join(out))


if __name__ == "__main__":
    main()
