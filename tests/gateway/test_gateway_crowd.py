"""Many streams at one gateway: 500 that wait beside 64 that stream, without an error."""

from __future__ import annotations

import pytest

from perf.gateway_crowd import Crowd, measure


@pytest.mark.slow
def test_500_idle_streams_beside_64_active_ones() -> None:
    assert measure(idle=500, active=64, tokens=60) == Crowd(500, 64, 0.0)
