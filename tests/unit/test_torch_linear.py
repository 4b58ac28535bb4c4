"""Packed linear layers compute what the plain ones do, and give their weights back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from pocket_backend.executors.torch_linear import (  # noqa: E402
    PackedLinear,
    can_pack,
    pack_linears,
)

DTYPES = (torch.float32, torch.bfloat16)


def layer(rows: int, columns: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(rows)
    return nn.Linear(columns, rows, bias=bias).to(dtype).requires_grad_(False)


@pytest.fixture(autouse=True)
def packable() -> None:
    for dtype in DTYPES:
        if not can_pack(dtype):
            pytest.skip(f"this torch does not pack {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (8,), (67,), (2, 3), (0,)])
@torch.no_grad()
def test_products(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    plain = layer(48, 80, dtype, bias=bias)
    packed = PackedLinear(plain)
    x = torch.randn(*shape, 80).to(dtype)
    exact = nn.functional.linear(x.double(), plain.weight.double(), None)
    if bias:
        exact = exact + plain.bias.double()
    got = packed(x)
    assert got.dtype == dtype
    assert got.shape == (*shape, 48)
    # Sums of 80 terms, each product rounded once in float32, the result once to its type.
    bound = 80 * 2**-23 * (x.double().abs() @ plain.weight.double().abs().T)
    bound = bound + torch.finfo(dtype).eps * exact.abs() + 2**-20
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_weights_come_back_when_asked_for(dtype: torch.dtype) -> None:
    plain = layer(40, 64, dtype)
    expected = plain.weight.clone()
    packed = PackedLinear(plain)
    assert packed.packed
    x = torch.randn(5, 64).to(dtype)
    before = packed(x)
    assert torch.equal(packed.weight, expected)
    assert not packed.packed
    assert packed.weight is packed.weight
    torch.testing.assert_close(packed(x), before)


class Special(nn.Linear):
    """May compute something else."""


@torch.no_grad()
def test_which_layers_are_packed() -> None:
    shared = layer(16, 32, torch.float32)
    model = nn.Sequential(
        layer(32, 32, torch.float32),
        shared,
        nn.Sequential(shared, Special(16, 16), nn.Linear(16, 4).half()),
    )
    embedding = nn.Embedding(50, 32)
    head = nn.Linear(32, 50, bias=False)
    head.weight = embedding.weight
    model.add_module("embedding", embedding)
    model.add_module("head", head)
    table = embedding.weight.clone()
    assert pack_linears(model) == 3
    assert isinstance(model[0], PackedLinear)
    assert model[1] is model[2][0]
    assert isinstance(model[1], PackedLinear)
    assert type(model[2][1]) is Special
    assert type(model[2][2]) is nn.Linear
    assert torch.equal(model.embedding.weight, table)  # the tied table is still there
    x = torch.randn(3, 32)
    torch.testing.assert_close(model.head(x), x @ table.T)
    assert pack_linears(model) == 0
