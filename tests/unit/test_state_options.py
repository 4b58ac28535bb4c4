"""Options about snapshots of recurrent state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pocket_backend.api import ConfigurationError, EngineArgs
from pocket_backend.executors.cpp_options import CppEngineOptions
from pocket_backend.executors.state_options import default_snapshots, snapshot_interval
from pocket_backend.executors.torch_options import TorchOptions

BACKENDS = [CppEngineOptions.from_mapping, TorchOptions.from_mapping]


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_state_snapshots", -1),
        ("max_state_snapshots", True),
        ("state_snapshot_interval_tokens", 0),
        ("state_snapshot_interval_tokens", "4096"),
    ],
)
def test_bad_values_are_refused_by_name(
    make: Callable[[dict[str, object]], object], name: str, value: object
) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}: got .*; must be an integer from"):
        make({name: value})


@pytest.mark.parametrize("make", BACKENDS)
def test_the_older_names_reach_the_backend(make: Callable[[dict[str, object]], object]) -> None:
    options = {"max_state_snapshots": 82, "state_snapshot_interval_tokens": 4096}
    args = EngineArgs("m", backend_options=options).resolved()
    made = make(dict(args.backend_options))
    assert {name: getattr(made, name) for name in options} == options


@pytest.mark.parametrize(
    ("state", "kv", "available", "count"),
    [
        (48 << 20, 1 << 30, None, 21),  # as much as the KV pool takes
        (48 << 20, 1 << 20, None, 4),
        (1 << 10, 1 << 30, None, 82),
        (48 << 20, 1 << 30, 1 << 30, 2),  # a tenth of what is left
        (48 << 20, 1 << 30, 0, 0),
    ],
)
def test_default_number(state: int, kv: int, available: int | None, count: int) -> None:
    assert default_snapshots(state, kv, available) == count


def test_default_interval() -> None:
    assert snapshot_interval(None, on_cpu=True) == 512
    assert snapshot_interval(None, on_cpu=False) == 4096
    assert snapshot_interval(16, on_cpu=False) == 16
