"""A client that leaves frees its slot, however it leaves and wherever its request is."""

from __future__ import annotations

import json
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from triton_clients import (
    GrpcStream,
    at_baseline,
    control,
    generate,
    generate_stream,
    grpc,
    grpc_stream,
    wait_for,
)

from pocket_backend.triton.launcher import TritonServer

# 10 ms a step: left alone, such a request runs for forty seconds or more.
LONG = {"text_input": "prompt", "max_tokens": 4000, "ignore_eos": True}
FREED = 25.0
"""Seconds in which requests that were left must be gone, however slow the machine."""


def stats(server: TritonServer) -> dict[str, object]:
    return control(server.http_url, {"stats": True})


def wait_for_baseline(server: TritonServer) -> None:
    wait_for(lambda: at_baseline(stats(server)), FREED, "baseline")


def http_stream(server: TritonServer, body: dict[str, object]) -> socket.socket:
    """An open generate_stream connection of which the first events have been read."""
    parts = urlsplit(server.http_url)
    data = json.dumps({"stream": True, **body}).encode()
    connection = socket.create_connection((parts.hostname, parts.port), timeout=60)
    connection.sendall(
        b"POST /v2/models/pocketllm/generate_stream HTTP/1.1\r\nHost: x\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
    )
    received = b""
    while b"text_output" not in received:
        data = connection.recv(4096)
        assert data, f"closed after {received!r}"
        received += data
    return connection


def test_grpc_cancel(fake_server: TritonServer) -> None:
    stream = GrpcStream(fake_server.grpc_address, {"stream": True, **LONG})
    next(iter(stream))
    wait_for(lambda: stats(fake_server)["running"] == 1, what="running")
    stream.close(cancel=True)
    wait_for_baseline(fake_server)


@pytest.mark.parametrize("abrupt", [False, True], ids=["close", "reset"])
def test_t8_http_disconnect(fake_server: TritonServer, abrupt: bool) -> None:
    """T8: Triton's HTTP front end notices when it next writes."""
    connection = http_stream(fake_server, LONG)
    wait_for(lambda: stats(fake_server)["running"] == 1, what="running")
    if abrupt:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    wait_for_baseline(fake_server)


def test_direct_request_to_the_generator(fake_server: TritonServer) -> None:
    stream = GrpcStream(
        fake_server.grpc_address,
        {"input_ids": [1, 2, 3], "stream": True},
        model="generator",
        parameters={"max_tokens": 4000, "ignore_eos": True},
    )
    next(iter(stream))
    stream.close(cancel=True)
    wait_for_baseline(fake_server)


def test_cancel_by_request_id_ends_the_stream_with_an_error(fake_server: TritonServer) -> None:
    with GrpcStream(
        fake_server.grpc_address, {"stream": True, **LONG}, request_id="to-cancel"
    ) as stream:
        results = iter(stream)
        next(results)
        assert control(fake_server.http_url, {"cancel_request_id": "to-cancel"}) == {"cancelled": 1}
        with pytest.raises(grpc.InferenceServerException, match="cancelled"):
            list(results)
    wait_for_baseline(fake_server)


def test_queued_requests_are_cancelled_by_id(fake_server: TritonServer) -> None:
    """More streams than slots: those that wait emit nothing, so nobody would notice."""
    streams = [
        GrpcStream(fake_server.grpc_address, {"stream": True, **LONG}, request_id=f"q{i}")
        for i in range(24)
    ]
    wait_for(lambda: stats(fake_server)["running"] == 16, what="all slots in use")
    wait_for(lambda: stats(fake_server)["waiting"] == 8, what="the rest waiting")
    for i in range(24):
        control(fake_server.http_url, {"cancel_request_id": f"q{i}"})
    for stream in streams:
        with stream, pytest.raises(grpc.InferenceServerException, match="cancelled"):
            list(stream)
    wait_for_baseline(fake_server)


def test_deadline(fake_server: TritonServer) -> None:
    for seconds in (0.3, 3, 15):  # until the first token comes before the deadline
        body = {**LONG, "timeout_ms": int(seconds * 1000)}
        reply = grpc_stream(fake_server.grpc_address, body)
        assert reply.error is not None
        assert f"{seconds} s" in reply.error
        if reply.responses:
            break
    assert 0 < reply.responses < 4000
    single = generate(fake_server.http_url, {**LONG, "timeout_ms": 200})
    assert "0.2 s" in str(single.error)
    wait_for_baseline(fake_server)


def test_two_hundred_closed_streams_leave_nothing(fake_server: TritonServer) -> None:
    """Closed at different moments: queued, just started, half-way; by gRPC and by HTTP."""

    def visit(i: int) -> None:
        if i % 2:
            http_stream(fake_server, LONG).close()
            return
        stream = GrpcStream(
            fake_server.grpc_address, {"stream": True, **LONG, "timeout_ms": 20_000}
        )
        results = iter(stream)
        for _ in range(1 + i % 7):
            next(results)
        stream.close(cancel=True)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(visit, range(200)))
    wait_for_baseline(fake_server)


def test_others_go_on_while_clients_leave(fake_server: TritonServer) -> None:
    body = {"text_input": "steady", "max_tokens": 100, "ignore_eos": True}
    expected = generate(fake_server.http_url, body)
    stop = threading.Event()

    def leave() -> None:
        while not stop.is_set():
            http_stream(fake_server, LONG).close()

    with ThreadPoolExecutor(6) as pool:
        leaving = [pool.submit(leave) for _ in range(2)]
        steady = [pool.submit(generate_stream, fake_server.http_url, body) for _ in range(4)]
        replies = [future.result() for future in steady]
        stop.set()
        for future in leaving:
            future.result()
    for reply in replies:
        assert (reply.error, reply.token_ids) == (None, expected.token_ids)
    wait_for_baseline(fake_server)
