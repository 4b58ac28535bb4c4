"""HTTP itself: the parser's bound on what a message has besides its body."""

from __future__ import annotations

import json
import socket

import pytest
from fake_upstream import FakeUpstream, words
from gateway_server import WAIT, RunningGateway, call, read_until

pytest.importorskip("httptools")

PATH = "/v1/chat/completions"
BODY = json.dumps(
    {"model": "pocketllm", "messages": [{"role": "user", "content": "x" * 200_000}]}
).encode()
ENOUGH = 32 << 20
"""Far beyond the bound with what the system buffers."""
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()


def connect(gateway: RunningGateway) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), timeout=WAIT)


def sent_before_refusal(connection: socket.socket, piece: bytes) -> int:
    """Bytes that could be sent, those in buffers of the system included; at most ``ENOUGH``."""
    sent = 0
    try:
        while sent < ENOUGH:
            connection.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /", b"a" * 4096),
        (b"GET / HTTP/1.1\r\nx-long: ", b"a" * 4096),
        (b"GET / HTTP/1.1\r\n", b"x-many: a\r\n" * 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx-trailer: ", b"a" * 4096),
    ],
    ids=["request line", "one header", "many headers", "trailer"],
)
def test_a_head_without_end_ends_the_connection(
    gateway: RunningGateway, begin: bytes, piece: bytes
) -> None:
    with connect(gateway) as connection:
        connection.sendall(begin)
        assert sent_before_refusal(connection, piece) < ENOUGH
    assert call(gateway, "GET", "/health").status == 200


@pytest.mark.parametrize("size", [1000, 100_000])
def test_bodies_in_chunks_are_no_head(
    gateway: RunningGateway, upstream: FakeUpstream, size: int
) -> None:
    upstream.script = words
    parts = [BODY[at : at + size] for at in range(0, len(BODY), size)]
    with connect(gateway) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for part in parts:
            connection.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert read_until(connection, b"chat.completion").startswith(b"HTTP/1.1 200 ")


def test_one_connection_serves_many_large_bodies(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    """What one message had does not count for the next."""
    with connect(gateway) as connection:
        for _ in range(3):
            connection.sendall(HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
            assert read_until(connection, b'"total_tokens"').startswith(b"HTTP/1.1 200 ")


def test_a_broken_request_is_refused(gateway: RunningGateway) -> None:
    for broken in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"\0\0\0\0\r\n\r\n"):
        with connect(gateway) as connection:
            connection.sendall(broken)
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
