"""A gateway on a free port of loopback, in a thread, and raw HTTP to talk to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import uvicorn

from pocket_client.gateway.__main__ import http_protocol
from pocket_client.gateway.app import create_app
from pocket_client.gateway.settings import GatewaySettings

WAIT = 60.0
"""Seconds until a wait is given up; never reached when all is well, however slow the machine."""


class RunningGateway:
    """Context manager; ``port`` is where it listens (0: a free one)."""

    def __init__(self, settings: GatewaySettings, port: int = 0) -> None:
        self.app = create_app(settings)
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self.app,
            http=http_protocol(),
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> Self:
        self._thread.start()
        eventually(lambda: self._server.started, "the gateway starts")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT)
        self._socket.close()
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str, **labels: str) -> float:
        value = self.app.state.service.metrics.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value


def eventually(condition: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what or condition}"
        time.sleep(0.005)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object; asserts its form."""
        assert self.headers["content-type"] == "application/json"
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """Events of a stream, parsed; the last one is the string ``[DONE]`` if it came."""
        assert self.headers["content-type"].startswith("text/event-stream")
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    events = []
    for block in body.decode().split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


def call(
    gateway: RunningGateway,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """One request on a connection of its own; ``bytes`` are sent as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WAIT)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, {**sent, **(headers or {})})
        response = connection.getresponse()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, named, response.read())
    finally:
        connection.close()


def open_request(gateway: RunningGateway, path: str, body: object) -> socket.socket:
    """Send a request and leave the connection open."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", gateway.port), timeout=WAIT)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return connection


def read_until(connection: socket.socket, text: bytes) -> bytes:
    received = b""
    while text not in received:
        data = connection.recv(4096)
        assert data, f"closed before {text!r}: {received!r}"
        received += data
    return received
