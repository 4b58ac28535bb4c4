"""A Docker engine for the tests below: the one that answers, else a private one (root only)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from compose_project import ComposeProject, base_images

from tools import docker_engine

_SKIPPED = "no Docker engine answers, and none can be started: "


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    named = os.environ.get("DOCKER_HOST")
    if named is not None:
        answers = subprocess.run(["docker", "version"], capture_output=True, check=False)
        assert answers.returncode == 0, f"DOCKER_HOST={named} does not answer"
        yield named
        return
    try:
        with docker_engine.engine() as address:
            yield address
    except docker_engine.EngineError as error:
        pytest.skip(f"{_SKIPPED}{error}")


@pytest.fixture(scope="session")
def client(docker_host: str) -> Iterator[Any]:
    sdk = pytest.importorskip("docker", reason="pip install -r requirements/docker.txt")
    found = sdk.DockerClient(base_url=docker_host, timeout=300)
    yield found
    found.close()


@pytest.fixture(scope="session")
def bases(docker_host: str) -> dict[str, str]:
    """Base images by variable of compose.yaml."""
    return base_images(docker_host)


@pytest.fixture(scope="module")
def project(
    docker_host: str, bases: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[ComposeProject]:
    """Built, and removed with everything that it made; a module starts what it needs."""
    name = request.module.__name__.rsplit(".", 1)[-1].removeprefix("test_")
    made = ComposeProject(docker_host, f"pocketllm-test-{name}", bases)
    made.compose("build")
    try:
        yield made
    finally:
        made.compose("down", "--volumes", "--remove-orphans", profiles=("demo", "scale"))
