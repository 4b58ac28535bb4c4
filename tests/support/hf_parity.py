"""What every architecture is held to in the C++ engine, on tiny random checkpoints (tiny_hf.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from engine_driver import Driver, Part
from tiny_hf import CONTEXT, logits_of, random_tokens

TOKENS = 210
TOLERANCE = 2e-4
"""Of logits with a standard deviation above 0.5: what the order of float32 additions leaves."""


def exact(path: Path, **options: Any) -> Driver:
    """An engine that computes in float32 throughout, as Transformers does."""
    return Driver(path, context=CONTEXT, precision="f32", kv_dtype="f32", **options)


def check_logits(path: Path, model: Any, count: int = TOKENS) -> None:
    """Logits equal Transformers' at every position, at once and across chunk boundaries."""
    tokens = random_tokens(count)
    expected = logits_of(model, tokens)
    assert expected.std() > 0.5
    driver = exact(path)
    for chunk in (None, 17):
        worst = np.abs(driver.all_logits(tokens, chunk=chunk) - expected).max(axis=1)
        for position in (0, 20, 200):
            assert worst[position] < TOLERANCE, (chunk, position, float(worst[position]))
        assert worst.max() < TOLERANCE, (chunk, int(worst.argmax()), float(worst.max()))


def check_rows(path: Path, *, isas: tuple[str | None, ...] = (None,), **options: Any) -> None:
    """A row's bits depend on nothing of its step: one thread of plain C++ at once, several threads
    in chunks (shorter than a convolution, too), and beside other sequences in scattered blocks.
    """
    tokens, others = random_tokens(60), random_tokens(33, seed=8)
    options |= {"context": 64}
    expected = Driver(path, threads=1, isa="scalar", **options).all_logits(tokens)
    for isa in isas:
        for threads, chunk in ((2, 1), (2, 2), (2, 7), (3, 32), (4, 60)):
            got = Driver(path, threads=threads, isa=isa, **options)
            assert np.array_equal(got.all_logits(tokens, chunk=chunk), expected), (isa, chunk)
    mixed = Driver(path, rows=3, threads=2, shuffle=1, **options)
    pieces = [mixed.logits(Part(tokens[:20], 0, 0, range(20)), Part(others, 0, 1))[:20]]
    mixed.logits(Part(others[:5], 0, 2))
    pieces.append(mixed.logits(Part(others[5:6], 5, 2), Part(tokens[20:], 20, 0, range(40)))[1:])
    assert np.array_equal(np.concatenate(pieces), expected)
