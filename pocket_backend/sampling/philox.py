"""The random numbers of sampling: Philox4x32-10, random access by seed and token index.

The same stream as ``pocket/sampling/philox.h``, so that a seed means the same whatever the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(2**32 - 1)
_WORD = np.uint64(32)
_MASK64 = 2**64 - 1

Words = tuple["NDArray[np.uint64]", ...]


def philox4x32_10(counter: Words, key: Words) -> Words:
    """Four words of 32 bits per element, from four counter words and two key words (all uint64)."""
    a, b, c, d = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b, c, d = (
            (second >> _WORD) ^ b ^ key0,
            second & _LOW,
            (first >> _WORD) ^ d ^ key1,
            first & _LOW,
        )
        key0 = (key0 + np.uint64(_WEYL[0])) & _LOW
        key1 = (key1 + np.uint64(_WEYL[1])) & _LOW
    return a, b, c, d


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per (seed, index).

    A negative seed counts as its two's complement of 64 bits.
    """
    seed = np.array([value & _MASK64 for value in seeds], dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    zero = np.zeros_like(index)
    a, b, _, _ = philox4x32_10(
        (index & _LOW, index >> _WORD, zero, zero), (seed & _LOW, seed >> _WORD)
    )
    return ((a << _WORD | b) >> np.uint64(11)).astype(np.float64) * 2.0**-53
