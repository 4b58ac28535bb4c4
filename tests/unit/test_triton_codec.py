"""Tensors to Python values: what is accepted, and that errors name the field."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from triton_doubles import Request, ints, make_pb_utils, strings

from pocket_backend.api import BackendUnavailableError, InvalidRequestError
from pocket_backend.triton import codec

PB = make_pb_utils()


def test_scalars_and_lists() -> None:
    values = codec.read_inputs(
        Request(
            {
                "text_input": strings("caf\u00e9"),
                "max_tokens": ints(5),
                "scalar": np.array(5, dtype=np.int32),
                "matrix": np.array([[5]], dtype=np.int32),
                "input_ids": ints(1, 2, 3),
                "stop": strings("a", "b"),
                "stream": np.array([True]),
                "seed": np.array([2**64 - 1], dtype=np.uint64),
            }
        )
    )
    assert values == {
        "text_input": "caf\u00e9",
        "max_tokens": 5,
        "scalar": 5,
        "matrix": 5,
        "input_ids": [1, 2, 3],
        "stop": ["a", "b"],
        "stream": True,
        "seed": 2**64 - 1,
    }
    assert all(type(v) in (str, int, bool, list) for v in values.values())


@given(st.decimals(min_value=0, max_value=100, places=3))
def test_fp32_reads_as_the_decimal_that_was_written(value: object) -> None:
    written = float(str(value))
    assert codec.value_of("temperature", np.array([written], dtype=np.float32)) == written


def test_nan_stays_nan() -> None:
    value = codec.value_of("temperature", np.array([np.nan], dtype=np.float32))
    assert value != value


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (strings(b"ab\xff"), "x: not UTF-8 text (byte 0xff at position 2)"),
        (strings(b"\xed\xa0\x80"), "x: not UTF-8 text (byte 0xed"),
        (np.array([5], dtype=object), "x: must be a string"),
        (np.zeros((2, 2), dtype=np.int32), "x: shape [2, 2]"),
        (np.array([1j]), "x: tensors of complex128"),
        (None, "x: this tensor type"),
    ],
)
def test_refusals(array: np.ndarray | None, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        codec.value_of("x", array)
    assert str(caught.value).startswith(message)
    assert caught.value.field == "x"


def test_ids_must_be_integers() -> None:
    assert codec.token_ids_of("input_ids", np.array([[1, 2]], dtype=np.int64)) == (1, 2)
    with pytest.raises(InvalidRequestError, match="input_ids: must be integers"):
        codec.token_ids_of("input_ids", np.array([1.0], dtype=np.float32))


def test_text_survives_and_lone_surrogates_do_not_raise() -> None:
    assert codec.text(PB, "t", "\U0001f600\0").as_numpy()[0] == "\U0001f600\0".encode()
    assert codec.text(PB, "t", "a\ud800").as_numpy()[0] == b"a?"


def test_t15_self_test_passes_and_detects_a_broken_stub() -> None:
    codec.self_test(PB)
    # What numpy 2 does to an older stub: string tensors come back empty or cut.
    broken = make_pb_utils()
    broken.deserialize_bytes_tensor = lambda _data: np.array([], dtype=object)
    with pytest.raises(BackendUnavailableError, match="numpy<2"):
        codec.self_test(broken)
