"""T8: a client that leaves frees its slot, streaming or not; requests are cancelled by id, too."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_upstream import FakeUpstream, failing, two_then_wait, wait_first, words
from gateway_server import (
    WAIT,
    RunningGateway,
    call,
    eventually,
    open_request,
    parse_events,
    read_until,
)

from pocket_client.gateway.auth import ApiKeys, entry_of
from pocket_client.gateway.settings import GatewaySettings

CHAT = {"model": "pocketllm", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "pocketllm", "prompt": ["x", "y"]}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("script", "stream"),
    [(two_then_wait, True), (wait_first, True), (wait_first, False), (two_then_wait, False)],
    ids=["streaming", "before-the-first-token", "not-streaming", "not-streaming-running"],
)
def test_t8_disconnects_cancel_upstream(
    gateway: RunningGateway,
    upstream: FakeUpstream,
    path: str,
    leave: Callable[[socket.socket], None],
    script: Any,
    stream: bool,
) -> None:
    upstream.script = script
    before = gateway.metric("pocketllm_gateway_client_disconnects_total")
    body = PATHS[path]
    connection = open_request(gateway, path, {**body, "stream": stream})
    received = upstream.wait_for_requests(2 if body is TEXT else 1)
    if stream and script is two_then_wait:
        read_until(connection, b" two")
    leave(connection)
    upstream.wait_for(lambda: all(r.over.is_set() for r in received), "the RPCs are cancelled")
    ids = {r.id for r in received}
    upstream.wait_for(lambda: ids <= set(upstream.cancelled_ids), "cancelled by id")
    disconnects = "pocketllm_gateway_client_disconnects_total"
    eventually(lambda: gateway.metric(disconnects) == before + 1, "counted")
    eventually(lambda: gateway.metric("pocketllm_gateway_generations_in_flight") == 0, "left")
    assert call(gateway, "GET", "/health").status == 200


def test_a_hundred_clients_leave_and_the_others_stay(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    upstream.script = two_then_wait
    path = "/v1/chat/completions"
    connections = [open_request(gateway, path, {**CHAT, "stream": True}) for _ in range(100)]
    for connection in connections:
        read_until(connection, b" two")
    leaving, staying = connections[::2], connections[1::2]
    for connection in leaving:
        connection.close()
    upstream.wait_for(lambda: sum(r.over.is_set() for r in upstream.received) == 50, "50 left")
    upstream.release()
    for connection in staying:
        assert b'" end"' in read_until(connection, b"[DONE]")
        connection.close()


def test_a_client_that_stops_reading_is_dropped(
    upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold its place for ever; upstream its request ends with the timeout anyway."""
    monkeypatch.setattr("pocket_client.gateway.generation.STALL_SECONDS", 0.2)
    upstream.script = lambda _: iter([("chunk", ("x" * 65536, (1,), ""))] * 2000)
    settings = GatewaySettings(upstream=upstream.address, request_timeout=0.3)
    with RunningGateway(settings) as gateway:
        connection = open_request(gateway, "/v1/chat/completions", {**CHAT, "stream": True})
        upstream.wait_for_requests(1)
        in_flight = "pocketllm_gateway_generations_in_flight"
        eventually(lambda: gateway.metric(in_flight) == 0, "it is dropped")
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [words, failing(("error", "computing failed: boom"))])
def test_whoever_has_the_whole_answer_finds_a_place_at_once(
    upstream: FakeUpstream, script: Any, stream: bool
) -> None:
    """With one place in all, one request after another is never refused."""
    upstream.script = script
    settings = GatewaySettings(upstream=upstream.address, max_in_flight=1)
    with RunningGateway(settings) as gateway:
        body = {**CHAT, "stream": stream}
        replies = [call(gateway, "POST", "/v1/chat/completions", body) for _ in range(40)]
    assert {reply.status for reply in replies} == {200 if script is words else 500}


# --- by id --------------------------------------------------------------------------------------


def test_cancelling_a_stream_ends_it_with_an_error_event(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    upstream.script = two_then_wait
    connection = open_request(gateway, "/v1/chat/completions", {**CHAT, "stream": True})
    head, _, events = read_until(connection, b" two").partition(b"\r\n\r\n")
    assert b"x-request-id: req-" in head
    name = json.loads(events.split(b"data: ")[1].split(b"\n")[0])["id"]
    reply = call(gateway, "DELETE", f"/v1/requests/{name}")
    assert reply.json == {"id": name, "object": "request", "cancelled": 1}
    rest = read_until(connection, b"0\r\n\r\n")  # the end of the body: no waiting for a timeout
    connection.close()
    assert b'"code": "request_cancelled"' in rest
    assert b"[DONE]" not in rest
    (received,) = upstream.received
    upstream.wait_for(lambda: received.id in upstream.cancelled_ids, "cancelled upstream")
    assert call(gateway, "DELETE", f"/v1/requests/{name}").status == 404


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_before_the_first_token_by_the_clients_own_id(
    gateway: RunningGateway, upstream: FakeUpstream, stream: bool
) -> None:
    upstream.script = wait_first
    replies: list[Any] = []

    def ask() -> None:
        body = {**CHAT, "stream": stream}
        headers = {"X-Request-Id": "mine"}
        replies.append(call(gateway, "POST", "/v1/chat/completions", body, headers))

    thread = threading.Thread(target=ask)
    thread.start()
    upstream.wait_for_requests(1)
    assert call(gateway, "DELETE", "/v1/requests/mine").status == 200
    thread.join(WAIT)
    (reply,) = replies
    assert (reply.status, reply.error["code"]) == (499, "request_cancelled")
    (received,) = upstream.received
    upstream.wait_for(lambda: received.id in upstream.cancelled_ids, "cancelled upstream")


def test_cancelled_on_the_server_behind_our_back(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    upstream.script = two_then_wait
    connection = open_request(gateway, "/v1/chat/completions", {**CHAT, "stream": True})
    read_until(connection, b" two")
    upstream.received[0].cancelled = True
    assert b"request_cancelled" in read_until(connection, b"0\r\n\r\n")
    connection.close()


def test_a_tenant_cannot_cancel_anothers_request(upstream: FakeUpstream) -> None:
    upstream.script = two_then_wait
    keys = ApiKeys.parse([entry_of("a", "key-a"), entry_of("b", "key-b")])
    as_a, as_b = ({"Authorization": f"Bearer key-{name}"} for name in "ab")
    with RunningGateway(GatewaySettings(upstream=upstream.address, api_keys=keys)) as gateway:
        replies: list[bytes] = []
        body = {**CHAT, "stream": True}
        thread = threading.Thread(
            target=lambda: replies.append(
                call(
                    gateway,
                    "POST",
                    "/v1/chat/completions",
                    body,
                    {**as_a, "X-Request-Id": "shared"},
                ).body
            )
        )
        thread.start()
        (received,) = upstream.wait_for_requests(1)
        assert call(gateway, "DELETE", "/v1/requests/shared", headers=as_b).status == 404
        assert call(gateway, "DELETE", "/v1/requests/shared").status == 401
        upstream.release()
        thread.join(WAIT)
        assert received.id not in upstream.cancelled_ids
        assert parse_events(replies[0])[-1] == "[DONE]"
