"""The openai package for Node against the gateway (`make client-test` installs it)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_upstream import WORDS, FakeUpstream, failing, two_then_wait
from gateway_server import RunningGateway

FOLDER = Path(__file__).parent / "node"
NODE = shutil.which("node")
TEXT = "".join(WORDS)
pytestmark = pytest.mark.skipif(
    NODE is None or not (FOLDER / "node_modules" / "openai").is_dir(),
    reason="node or its openai package is not installed (make client-test)",
)


def ask(gateway: RunningGateway, scenario: str) -> Any:
    assert NODE is not None
    command = [NODE, "client.mjs", f"{gateway.url}/v1", scenario]
    run = subprocess.run(command, cwd=FOLDER, capture_output=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr.decode()
    return json.loads(run.stdout)


def test_an_answer(gateway: RunningGateway) -> None:
    assert ask(gateway, "answer") == {"text": "Hello,", "finish": "length", "tokens": 2}


def test_a_stream(gateway: RunningGateway) -> None:
    assert ask(gateway, "stream") == {"text": TEXT, "tokens": 5}


def test_the_stream_helper(gateway: RunningGateway) -> None:
    assert ask(gateway, "helper") == {"deltas": TEXT, "final": TEXT}


def test_responses(gateway: RunningGateway) -> None:
    assert ask(gateway, "responses") == {
        "first": "response.created",
        "last": "response.completed",
        "text": TEXT,
    }


def test_models(gateway: RunningGateway) -> None:
    assert ask(gateway, "models") == ["pocketllm"]


def test_an_error(gateway: RunningGateway) -> None:
    assert ask(gateway, "error") == {
        "kind": "BadRequestError",
        "status": 400,
        "param": "temperature",
        "id": True,
    }


def test_an_error_in_a_stream(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    upstream.script = failing(("chunk", ("a", (1,), "")), ("error", "computing failed: boom"))
    seen = ask(gateway, "streamError")
    assert (seen["text"], seen["kind"]) == ("a", "APIError")
    assert "boom" in seen["message"]


def test_aborting_cancels(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    upstream.script = two_then_wait
    assert ask(gateway, "leave") == "one"
    (received,) = upstream.received
    upstream.wait_for(received.over.is_set, "cancelled upstream")
