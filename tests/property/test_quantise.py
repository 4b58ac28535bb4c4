"""Quantising at load: the bytes against the gguf package, K-quants' errors against plain scales."""

from __future__ import annotations

import ggml_quants
import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GgmlType
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import pocket_cpp_core

BLOCKS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
K_BLOCKS = ("q4_k", "q5_k", "q6_k")
LARGEST_CODE = {"q4_k": 15, "q5_k": 31, "q6_k": 31}
# Halves hold scales: below this a block's scale is a denormal half, and both methods are coarse.
# Which of 0.0 and -0.0 is a block's minimum is nobody's promise, so there is one zero.
FLOATS = st.floats(-1000.0, 1000.0, width=32).map(lambda x: x if abs(x) > 1e-3 else 0.0)


def quantize(values: np.ndarray, name: str) -> np.ndarray:
    return pocket_cpp_core.quantize_rows(np.ascontiguousarray(values, np.float32), name)


def decoded(packed: np.ndarray, name: str) -> np.ndarray:
    return gguf.quants.dequantize(packed, GgmlType[name.upper()])


def plain(values: np.ndarray, name: str) -> np.ndarray:
    """Round to nearest under minimum/maximum scales: an encoder that is independent of ours."""
    return decoded(ggml_quants.quantize(values, name.upper()), name)


def weights(kind: str, rows: int = 64, columns: int = 512) -> np.ndarray:
    random = np.random.default_rng(len(kind))
    values = {
        "gaussian": lambda: random.standard_normal((rows, columns)),
        "heavy tails": lambda: random.standard_t(3, (rows, columns)),
        "positive": lambda: random.random((rows, columns)) + 0.5,
        "rows of all sizes": lambda: (
            random.standard_normal((rows, columns)) * np.geomspace(1e-2, 1e2, rows)[:, None]
        ),
        "outliers": lambda: (
            random.standard_normal((rows, columns))
            + 50.0 * (random.random((rows, columns)) < 0.005)
        ),
        "few values": lambda: random.integers(-2, 3, (rows, columns)),
    }[kind]()
    return values.astype(np.float32)


KINDS = ("gaussian", "heavy tails", "positive", "rows of all sizes", "outliers", "few values")


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_the_bytes_of_the_gguf_package(name, kind):
    values = weights(kind)
    assert np.array_equal(
        quantize(values, name), gguf.quants.quantize(values, GgmlType[name.upper()])
    )


@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=100, deadline=None)
@given(values=arrays(np.float32, (1, 64), elements=FLOATS))
def test_any_block_is_the_bytes_of_the_gguf_package(name, values):
    assert np.array_equal(
        quantize(values, name), gguf.quants.quantize(values, GgmlType[name.upper()])
    )


def errors(values: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Squared error of each block of 256."""
    return ((values.astype(np.float64) - got) ** 2).reshape(-1, 256).sum(axis=1)


def bound(values: np.ndarray, name: str) -> np.ndarray:
    """What docs/formats.md states: two steps, for each block of 256."""
    blocks = values.reshape(-1, 256)
    if name == "q6_k":
        reach = np.abs(blocks).max(axis=1)
    else:
        reach = np.maximum(blocks.max(axis=1), 0) - np.minimum(blocks.min(axis=1), 0)
    return 2 * reach / LARGEST_CODE[name]


@pytest.mark.parametrize("name", K_BLOCKS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_k_block_is_worse_than_with_plain_scales(name, kind):
    values = weights(kind)
    got = decoded(quantize(values, name), name)
    ours, theirs = errors(values, got), errors(values, plain(values, name))
    assert (ours <= theirs * (1 + 5e-3) + 1e-9).all(), (ours / theirs).max()
    assert (np.abs(values - got).reshape(-1, 256).max(axis=1) <= bound(values, name)).all()
    if kind in ("gaussian", "heavy tails", "rows of all sizes"):
        assert ours.sum() < 0.97 * theirs.sum()


@pytest.mark.parametrize("name", K_BLOCKS)
@settings(max_examples=150, deadline=None)
@given(values=arrays(np.float32, (1, 256), elements=FLOATS))
def test_any_k_block_keeps_the_bound(name, values):
    got = decoded(quantize(values, name), name)
    assert (np.abs(values - got).max() <= bound(values, name) * (1 + 1e-3)).all()
    assert errors(values, got) <= errors(values, plain(values, name)) * (1 + 5e-3) + 1e-9


@pytest.mark.parametrize("name", K_BLOCKS)
def test_what_a_k_block_can_hold_is_kept(name):
    """Values that lie on a block's grid come back as they are, up to the rounding of its scales."""
    random = np.random.default_rng(1)
    top = 63 if name == "q6_k" else LARGEST_CODE[name]
    codes = random.integers(0, top + 1, (8, 256))
    codes[:, ::16], codes[:, 1::16] = 0, top
    offset = 32 if name == "q6_k" else 4
    values = ((codes - offset) * 0.25).astype(np.float32)
    got = decoded(quantize(values, name), name)
    assert np.abs(got - values).max() < 0.05


@pytest.mark.parametrize("name", BLOCKS + K_BLOCKS)
def test_zeros_and_numbers_that_are_none(name):
    assert not decoded(quantize(np.zeros((2, 256)), name), name).any()
    for value in (np.nan, np.inf, -np.inf):
        values = np.ones((1, 256), np.float32)
        values[0, 37] = value
        assert quantize(values, name).shape == quantize(np.zeros((1, 256)), name).shape


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "iq4_nl", "iq4_xs", "f16", "Q4_K", ""])
def test_formats_that_cannot_be_written_are_refused_by_name(name):
    with pytest.raises(
        pocket_cpp_core.Unsupported, match=f"format: got '{name}'; supported are q8"
    ):
        quantize(np.zeros((1, 256)), name)


def test_rows_that_are_not_whole_blocks_are_refused():
    with pytest.raises(pocket_cpp_core.InvalidArgument, match="256"):
        quantize(np.zeros((1, 288)), "q4_k")
    with pytest.raises(TypeError, match="values: must have dtype float32"):
        pocket_cpp_core.quantize_rows(np.zeros((1, 256)), "q4_k")
