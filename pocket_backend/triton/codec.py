"""Triton tensors to plain Python values and back; nothing else of the package sees numpy.

``pb_utils`` is the stub's ``triton_python_backend_utils``; passed in, so that tests can pass a
double.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pocket_backend.api.errors import BackendUnavailableError, InvalidRequestError


def read_inputs(request: Any) -> dict[str, object]:
    """All input tensors of a request as Python values.

    One-element tensors of any rank become scalars, longer ones lists; ``value_of`` says how each
    dtype is read. Lists of length one are told apart from scalars by the field table, not here.

    Raises:
        InvalidRequestError: bytes that are not UTF-8, an empty tensor, or an unsupported dtype.
    """
    values: dict[str, object] = {}
    for tensor in request.inputs():
        values[tensor.name()] = value_of(tensor.name(), tensor.as_numpy())
    return values


def read_parameters(request: Any) -> dict[str, object]:
    """Request parameters by name (strings, integers, floats and booleans)."""
    text = request.parameters()
    parsed = json.loads(text) if text else {}
    return parsed if isinstance(parsed, dict) else {}


def value_of(name: str, array: np.ndarray[Any, Any] | None) -> object:
    """A tensor's content: a scalar for one element, else a flat list.

    FP32 values become the shortest decimal that rounds to them: what the client wrote, not its
    binary expansion (0.7, not 0.699999988).
    """
    if array is None:  # a stub that cannot map the tensor to numpy (BF16)
        raise InvalidRequestError(f"{name}: this tensor type is not supported", field=name)
    if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1):
        raise InvalidRequestError(
            f"{name}: shape {list(array.shape)}; must be a scalar or a list", field=name
        )
    flat = array.reshape(-1)
    if array.dtype == np.object_ or array.dtype.kind in "SU":
        items: list[object] = [_text(name, item) for item in flat]
    elif array.dtype == np.float32 or array.dtype == np.float16:
        items = [float(str(item)) for item in flat]
    elif array.dtype.kind in "iubf":
        items = flat.tolist()
    else:
        raise InvalidRequestError(f"{name}: tensors of {array.dtype} are not supported", field=name)
    return items[0] if len(items) == 1 else items


def token_ids_of(name: str, array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """A prompt or a run of ids; dtype any integer."""
    if array.dtype.kind not in "iu":
        raise InvalidRequestError(f"{name}: must be integers, got {array.dtype}", field=name)
    return tuple(array.reshape(-1).tolist())


def int32(pb_utils: Any, name: str, values: Iterable[int]) -> Any:
    return pb_utils.Tensor(name, np.array(tuple(values), dtype=np.int32))


def uint32(pb_utils: Any, name: str, *values: int) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=np.uint32))


def float32(pb_utils: Any, name: str, values: Iterable[float]) -> Any:
    return pb_utils.Tensor(name, np.array(tuple(values), dtype=np.float32))


def boolean(pb_utils: Any, name: str, value: bool) -> Any:
    return pb_utils.Tensor(name, np.array([value], dtype=np.bool_))


def text(pb_utils: Any, name: str, value: str) -> Any:
    """A BYTES tensor of one element; lone surrogates, which UTF-8 cannot hold, become ``?``."""
    return texts(pb_utils, name, (value,))


def texts(pb_utils: Any, name: str, values: Iterable[str]) -> Any:
    """A BYTES vector, each element as in ``text``."""
    encoded = [value.encode("utf-8", "replace") for value in values]
    return pb_utils.Tensor(name, np.array(encoded, dtype=np.object_))


def self_test(pb_utils: Any) -> None:
    """A round trip of BYTES through the stub's own serialisation, at start-up.

    Raises:
        BackendUnavailableError: strings do not survive (numpy 2 with an older stub).
    """
    sent = ["", "plain", "caf\u00e9 \U0001f600", "nul\0inside", "x" * 70000]
    array = np.array([item.encode() for item in sent], dtype=np.object_)
    try:
        packed = pb_utils.serialize_byte_tensor(array)
        received = [item.decode() for item in pb_utils.deserialize_bytes_tensor(packed)]
        through = pb_utils.Tensor("self_test", array).as_numpy()
        received_through = [item.decode() for item in through]
    except (ValueError, TypeError, AttributeError) as error:
        received, received_through = [repr(error)], []
    if received != sent or received_through != sent:
        raise BackendUnavailableError(
            f"string tensors do not survive this Triton stub with numpy {np.__version__}: "
            "install numpy<2"
        )


def _text(name: str, item: object) -> str:
    if isinstance(item, str):
        return item
    if not isinstance(item, bytes):
        raise InvalidRequestError(f"{name}: must be a string", field=name)
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{name}: not UTF-8 text (byte {item[error.start]:#04x} at position {error.start})",
            field=name,
        ) from None


def first_input(request: Any, name: str) -> np.ndarray[Any, Any] | None:
    for tensor in request.inputs():
        if tensor.name() == name:
            array: np.ndarray[Any, Any] = tensor.as_numpy()
            return array
    return None


def inputs_by_name(request: Any) -> Mapping[str, np.ndarray[Any, Any]]:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
