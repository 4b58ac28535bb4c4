"""Linear layers on the CPU with weights that oneDNN has put into its own order once, at load.

``torch.nn.Linear`` hands a plain matrix to the library at every call. With the few rows of a decode
step, reordering it (bfloat16) or walking it in an unsuited order (float32) costs more than the
products: docs/benchmarks.md has figures. The two operators used here are those of torch's own
compiler (``torch._inductor``, "freezing"); they are not a documented interface, so `can_pack` tries
them and nothing is packed where they are missing or wrong.

May import: torch.
"""

from __future__ import annotations

import logging
from typing import TypeGuard

import torch
from torch import nn

_log = logging.getLogger(__name__)

_ROWS_HINT = 64
"""Rows for which oneDNN chooses the order: as good as any other hint from 1 to 512 rows."""
_DTYPES = (torch.float32, torch.bfloat16)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return packed


def _multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


class PackedLinear(nn.Module):
    """Stands in for an ``nn.Linear`` without gradients; owns the only copy of its weights.

    Code of a model that reads ``weight`` gets the plain matrix, and the layer computes with that
    from then on: nothing is kept twice, nothing is unpacked twice.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed: torch.Tensor | None = _pack(linear.weight.detach())
        self._plain: nn.Parameter | None = None
        bias = linear.bias
        self.bias: nn.Parameter | None = bias

    @property
    def weight(self) -> nn.Parameter:
        """[out_features, in_features], as ``nn.Linear`` has it."""
        if self._packed is not None:
            self._plain = nn.Parameter(self._packed.to_dense(), requires_grad=False)
            self._packed = None
        assert self._plain is not None
        return self._plain

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        if self._packed is None:
            return nn.functional.linear(x, self.weight, self.bias)
        return _multiply(x, self._packed, self.bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has the operators for ``dtype``, and they compute a linear layer."""
    if dtype not in _DTYPES or not torch._C._has_mkldnn:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        packed = _pack(weight)
        got = _multiply(x, packed, bias)
        back = packed.to_dense()
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        _log.info("linear layers stay as they are: %s", error)
        return False
    expected = nn.functional.linear(x, weight, bias)
    # Sums of 64 products of magnitude 1, rounded in another order.
    allowed = 64 * torch.finfo(dtype).eps * expected.abs().max().item()
    return torch.equal(back, weight) and bool((got - expected).abs().max() <= allowed)


@torch.no_grad()
def pack_linears(model: nn.Module) -> int:
    """Replace the plain linear layers of a model on the CPU; returns how many.

    Layers of a subclass stay, and so do shapes that hold nothing. A weight that another module
    holds as well (a tied output head) stays there: it is then in memory twice, and the head four
    times as fast.
    """
    found: dict[nn.Module, PackedLinear] = {}
    usable: dict[torch.dtype, bool] = {}

    def wanted(module: nn.Module) -> TypeGuard[nn.Linear]:
        if type(module) is not nn.Linear:
            return False
        weight = module.weight
        if weight.device.type != "cpu" or weight.layout != torch.strided or not weight.numel():
            return False
        if weight.dtype not in usable:
            usable[weight.dtype] = can_pack(weight.dtype)
        return usable[weight.dtype]

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child not in found and wanted(child):
                found[child] = PackedLinear(child)
                # Now, not at the end: else all weights would be there twice for a while.
                child.weight = nn.Parameter(torch.empty(0), requires_grad=False)
            if child in found:
                setattr(parent, name, found[child])
    return len(found)
