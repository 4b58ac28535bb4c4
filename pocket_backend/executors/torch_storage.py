"""Storage of keys and values: one tensor per layer, in blocks whose ids the scheduler owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pocket_backend.api import EngineError


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer keeps per token."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.heads * (self.key_dim + self.value_dim)

    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize


class PagedStorage:
    """Keys and values of all layers. A token's key and value lie side by side ([heads, key_dim +
    value_dim]), so that writing and gathering are one operation each.

    Blocks are cleared before a sequence first uses them: attention reads whole blocks and masks
    what lies behind the sequence's end, and a NaN that another sequence left there would survive
    any mask.

    Args:
        shapes: by layer index.
        num_blocks, block_size: the pool.
    """

    def __init__(
        self,
        shapes: Mapping[int, KvShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.shapes = dict(shapes)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = {
            layer: torch.zeros(
                (num_blocks, block_size * shape.width), dtype=shape.dtype, device=device
            )
            for layer, shape in shapes.items()
        }
        self._tokens = {
            layer: blocks.view(num_blocks * block_size, shapes[layer].width)
            for layer, blocks in self._blocks.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(blocks.nbytes for blocks in self._blocks.values())

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store tokens.

        Args:
            places: int64 [tokens], see ``SlotTables.places``.
            key, value: [heads, tokens, key_dim or value_dim].
        """
        both = torch.cat((key, value), dim=-1).transpose(0, 1)
        self._tokens[layer].index_copy_(0, places, both.reshape(places.shape[0], -1))

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks.

        Args:
            blocks: int64 [sequences, count].

        Returns:
            [sequences, heads, count * block_size, key_dim], and the same with value_dim.
        """
        shape = self.shapes[layer]
        rows, count = blocks.shape
        # index_select copies block by block; indexing with a tensor is 30 times slower on CPUs.
        found = torch.index_select(self._blocks[layer], 0, blocks.reshape(-1))
        found = found.view(rows, count * self.block_size, shape.heads, -1).transpose(1, 2)
        return found[..., : shape.key_dim], found[..., shape.key_dim :]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to).

        Raises:
            EngineError: an id is out of range.
        """
        flat = [block for pair in pairs for block in pair]
        if min(flat) < 0 or max(flat) >= self.num_blocks:
            raise EngineError(f"block copies: ids are not from 0 to {self.num_blocks - 1}")
        for blocks in self._blocks.values():
            index = torch.tensor(pairs, device=blocks.device)
            blocks.index_copy_(0, index[:, 1], blocks.index_select(0, index[:, 0]))

    def clear(self, ids: Sequence[int]) -> None:
        """Fill blocks with zeros."""
        for blocks in self._blocks.values():
            blocks.index_fill_(0, torch.tensor(ids, device=blocks.device), 0)
