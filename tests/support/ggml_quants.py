"""Quantisers for the GGUF formats that the ``gguf`` package can only decode.

Round to nearest with plain minimum/maximum scales: good enough to make small test models, not a
rival of llama.cpp's quantiser. Every block is checked by decoding it with ``gguf`` in the tests.
Layouts: docs/formats.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SUPER_BLOCK = 256
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)


def quantize(values: np.ndarray, name: str) -> np.ndarray:
    """Rows of float32 as rows of bytes, in a format of ``FORMATS``.

    Args:
        values: [rows, columns]; columns a multiple of the format's block.
    """
    block, encode = FORMATS[name]
    rows, columns = values.shape
    assert columns % block == 0, (name, columns)
    blocks = encode(values.astype(np.float32).reshape(-1, block))
    return blocks.reshape(rows, -1)


def _half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Halves [n] as bytes [n, 2], and their values as float32."""
    halves = values.astype("<f2")
    return halves.view(np.uint8).reshape(-1, 2), halves.astype(np.float32)


def _divide(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """values / by, and 0 where ``by`` is 0."""
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _round(values: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(values), low, high).astype(np.int32)


def _scales_and_mins(
    blocks: np.ndarray, width: int, top: int, limit: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x = d*s*q - dmin*m: bytes of d and dmin, integers s and m [n, subs], codes [n, 256].

    ``top`` is the largest code, ``limit`` the largest s and m.
    """
    subs = blocks.reshape(len(blocks), -1, width)
    least = np.minimum(subs.min(axis=2), 0)
    span = (np.maximum(subs.max(axis=2), 0) - least) / top
    d_bytes, d = _half(span.max(axis=1) / limit)
    m_bytes, dmin = _half((-least).max(axis=1) / limit)
    s = _round(_divide(span, np.broadcast_to(d[:, None], span.shape)), 0, limit)
    m = _round(_divide(-least, np.broadcast_to(dmin[:, None], least.shape)), 0, limit)
    scale, minimum = (d[:, None] * s)[..., None], (dmin[:, None] * m)[..., None]
    scale, minimum = np.broadcast_to(scale, subs.shape), np.broadcast_to(minimum, subs.shape)
    codes = _round(_divide(subs + minimum, scale), 0, top)
    return d_bytes, m_bytes, s, m, codes.reshape(len(blocks), -1)


def _signed_scales(
    blocks: np.ndarray, width: int, reach: int, limit: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x = d*s*v: bytes of d, integers s [n, subs], x / (d*s) [n, subs, width].

    ``reach`` is the largest magnitude of v; every second s is negative, to exercise the sign.
    """
    subs = blocks.reshape(len(blocks), -1, width)
    scale = np.abs(subs).max(axis=2) / reach
    d_bytes, d = _half(scale.max(axis=1) / limit)
    s = _round(_divide(scale, np.broadcast_to(d[:, None], scale.shape)), 0, limit)
    s[:, 1::2] *= -1
    unit = np.broadcast_to((d[:, None] * s)[..., None], subs.shape)
    return d_bytes, s, _divide(subs, unit)


def _planes(codes: np.ndarray, bits: int, run: int = 32) -> np.ndarray:
    """Codes [n, 256] below 2^bits, 8 / bits runs of ``run`` per byte, lowest bits first."""
    per_byte = 8 // bits
    fields = codes.reshape(len(codes), -1, per_byte, run)
    shifts = (bits * np.arange(per_byte)).reshape(1, 1, -1, 1)
    return (fields << shifts).sum(axis=2).astype(np.uint8).reshape(len(codes), -1)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    d, dmin, s, m, codes = _scales_and_mins(blocks, 16, 3, 15)
    return np.hstack([(s | m << 4).astype(np.uint8), _planes(codes, 2), d, dmin])


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    d, s, ratio = _signed_scales(blocks, 16, 4, 31)
    codes = (_round(ratio, -4, 3) + 4).reshape(len(blocks), -1)
    stored = s + 32
    low = stored & 15
    low = low[:, :8] | low[:, 8:] << 4
    high = (stored >> 4).reshape(-1, 4, 4) << np.array([0, 2, 4, 6]).reshape(1, 4, 1)
    scales = np.hstack([low, high.sum(axis=1)]).astype(np.uint8)
    return np.hstack([_planes(codes >> 2, 1), _planes(codes & 3, 2), scales, d])


def _six_bit_pairs(s: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Eight scales and eight mins of 6 bits in 12 bytes (Q4_K, Q5_K)."""
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    third = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return np.hstack([first, second, third]).astype(np.uint8)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    d, dmin, s, m, codes = _scales_and_mins(blocks, 32, 15, 63)
    return np.hstack([d, dmin, _six_bit_pairs(s, m), _planes(codes, 4)])


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    d, dmin, s, m, codes = _scales_and_mins(blocks, 32, 31, 63)
    return np.hstack(
        [d, dmin, _six_bit_pairs(s, m), _planes(codes >> 4, 1), _planes(codes & 15, 4)]
    )


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    d, s, ratio = _signed_scales(blocks, 16, 31, 127)
    codes = (_round(ratio, -32, 31) + 32).reshape(len(blocks), -1)
    scales = s.astype(np.int8).view(np.uint8)
    return np.hstack([_planes(codes & 15, 4, run=64), _planes(codes >> 4, 2), scales, d])


def _nearest_iq4(ratio: np.ndarray) -> np.ndarray:
    middles = (IQ4_VALUES[1:] + IQ4_VALUES[:-1]) / 2
    return np.searchsorted(middles, ratio)


def _nibbles_32(codes: np.ndarray) -> np.ndarray:
    """Codes [n, k, 32] as k runs of 16 bytes: elements 0..15 in the low nibbles."""
    return (codes[..., :16] | codes[..., 16:] << 4).astype(np.uint8).reshape(len(codes), -1)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    d_bytes, d = _half(np.abs(blocks).max(axis=1) / 113)
    ratio = _divide(blocks, np.broadcast_to(d[:, None], blocks.shape))
    return np.hstack([d_bytes, _nibbles_32(_nearest_iq4(ratio)[:, None])])


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    d, s, ratio = _signed_scales(blocks, 32, 113, 31)
    stored = s + 32
    low = ((stored & 15)[:, ::2] | (stored & 15)[:, 1::2] << 4).astype(np.uint8)
    high = ((stored >> 4) << (2 * np.arange(8))).sum(axis=1).astype("<u2")
    high_bytes = high.view(np.uint8).reshape(-1, 2)
    return np.hstack([d, high_bytes, low, _nibbles_32(_nearest_iq4(ratio))])


FORMATS: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "Q2_K": (SUPER_BLOCK, _q2_k),
    "Q3_K": (SUPER_BLOCK, _q3_k),
    "Q4_K": (SUPER_BLOCK, _q4_k),
    "Q5_K": (SUPER_BLOCK, _q5_k),
    "Q6_K": (SUPER_BLOCK, _q6_k),
    "IQ4_NL": (32, _iq4_nl),
    "IQ4_XS": (SUPER_BLOCK, _iq4_xs),
}
