"""A scripted upstream for most tests, a real Triton server for the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_upstream import WAIT, FakeUpstream, words
from gateway_server import RunningGateway

from pocket_client.gateway.settings import GatewaySettings


@pytest.fixture(autouse=True)
def patient_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a cancel must not be given up after two seconds."""
    for module in ("client", "aio"):
        monkeypatch.setattr(f"pocket_client.{module}.CALL_SECONDS", WAIT)


@pytest.fixture(scope="session")
def _upstream() -> Iterator[FakeUpstream]:
    server = FakeUpstream()
    yield server
    server.close()


@pytest.fixture
def upstream(_upstream: FakeUpstream) -> Iterator[FakeUpstream]:
    """Cleared before each test; whatever a test leaves open is ended after it."""
    _upstream.script = words
    _upstream.received.clear()
    _upstream.controls.clear()
    _upstream.connections.clear()
    yield _upstream
    _upstream.settle()


@pytest.fixture(scope="session")
def _gateway(_upstream: FakeUpstream) -> Iterator[RunningGateway]:
    with RunningGateway(GatewaySettings(upstream=_upstream.address)) as running:
        yield running


@pytest.fixture
def gateway(upstream: FakeUpstream, _gateway: RunningGateway) -> RunningGateway:
    """With default settings and no keys, before ``upstream``."""
    return _gateway
