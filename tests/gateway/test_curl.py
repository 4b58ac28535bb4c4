"""curl against the gateway: answers, streams, large bodies, statuses, leaving."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from fake_upstream import WORDS, FakeUpstream, two_then_wait
from gateway_server import RunningGateway, parse_events

TEXT = "".join(WORDS)
CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="curl is not installed")


def curl(gateway: RunningGateway, path: str, body: object, *options: str) -> bytes:
    assert CURL is not None
    command = [CURL, "-sS", "--max-time", "60", *options, gateway.url + path]
    command += ["-H", "Content-Type: application/json", "-d", "@-"]
    data = json.dumps(body).encode()
    return subprocess.run(
        command, input=data, stdout=subprocess.PIPE, check=True, timeout=90
    ).stdout


def test_one_answer(gateway: RunningGateway) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = curl(gateway, "/v1/chat/completions", {"model": "pocketllm", "messages": messages})
    assert json.loads(body)["choices"][0]["message"]["content"] == TEXT


def test_a_stream(gateway: RunningGateway) -> None:
    request = {"model": "pocketllm", "prompt": "x", "stream": True}
    *chunks, done = parse_events(curl(gateway, "/v1/completions", request, "-N"))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert done == "[DONE]"


def test_a_large_body_with_expect_100_continue(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    """curl asks first before it sends more than a megabyte."""
    prompt = "word " * 300_000
    request = {"model": "pocketllm", "prompt": prompt}
    options = ("-H", "Expect: 100-continue")
    body = curl(gateway, "/v1/completions", request, *options)
    assert json.loads(body)["choices"][0]["text"] == TEXT
    assert upstream.received[0].inputs["text_input"] == prompt


def test_errors_have_their_status(gateway: RunningGateway) -> None:
    request = {"model": "pocketllm", "prompt": "x", "temperature": 9}
    body = curl(gateway, "/v1/completions", request, "-w", "\n%{http_code}")
    answer, status = body.decode().rsplit("\n", 1)
    assert status == "400"
    assert json.loads(answer)["error"]["param"] == "temperature"


def test_killing_curl_cancels(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    assert CURL is not None
    upstream.script = two_then_wait
    request = json.dumps({"model": "pocketllm", "prompt": "x", "stream": True})
    command = [CURL, "-sN", f"{gateway.url}/v1/completions", "-d", request]
    command += ["-H", "Content-Type: application/json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"one" in process.stdout.readline()
        process.kill()
    upstream.wait_for(lambda: bool(upstream.cancelled_ids), "cancelled upstream")
