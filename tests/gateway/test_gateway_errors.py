"""Every failure is OpenAI's error object with the right status, and ends the answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fake_upstream import FakeUpstream, failing, wait_first
from gateway_server import WAIT, RunningGateway, call, open_request, read_until

from pocket_client.gateway.schema import CHAT_REFUSED, COMPLETION_REFUSED
from pocket_client.gateway.settings import GatewaySettings

CHAT = {"model": "pocketllm", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "pocketllm", "prompt": "x"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
ENSEMBLE = "in ensemble 'pocketllm', "
SECRET = "a-secret-in-the-input"


# --- bodies (V11) -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"\xff\xfe",
        b"[]",
        b'"text"',
        b'{"a":',
        b"null",
        b'{"model": "pocketllm", "prompt": "x", "max_tokens": 1e999}',
        b'{"model": "pocketllm", "prompt": "x", "temperature": NaN}',
        b'{"model": "pocketllm", "prompt": "x", "temperature": Infinity}',
        b"[" * 100_000,
        b'{"model": "pocketllm", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH, "/tokenize", "/detokenize"])
def test_v11_bad_bodies(
    gateway: RunningGateway, upstream: FakeUpstream, path: str, body: bytes
) -> None:
    reply = call(gateway, "POST", path, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert not upstream.received


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (TEXT_PATH, "prompt", "a\ud800"),
        (TEXT_PATH, "prompt", ["fine", "\udfff"]),
        (TEXT_PATH, "stop", ["\ud800"]),
        (CHAT_PATH, "messages", [{"role": "user", "content": "\ud800"}]),
        (CHAT_PATH, "chat_template_kwargs", {"\ud800": 1}),
        ("/v1/responses", "input", [{"role": "user", "content": [{"text": "\ud800"}]}]),
        ("/v1/responses", "instructions", "\ud800"),
    ],
)
def test_text_that_no_encoding_has(
    gateway: RunningGateway, upstream: FakeUpstream, path: str, field: str, value: Any, stream: bool
) -> None:
    """JSON can write half of a surrogate pair, and an answer would have to repeat it."""
    given = {"prompt": "x"} if path == TEXT_PATH else {"input": "x"}
    if path == CHAT_PATH:
        given = {"messages": [{"role": "user", "content": "x"}]}  # type: ignore[dict-item]
    reply = call(
        gateway, "POST", path, {"model": "pocketllm", **given, "stream": stream, field: value}
    )
    assert (reply.status, reply.error["param"]) == (400, field)
    assert "surrogate" in reply.error["message"]
    assert not upstream.received


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_only_json_is_read(gateway: RunningGateway, kind: str) -> None:
    """A web page of another origin can send these without being asked for permission."""
    reply = call(gateway, "POST", TEXT_PATH, TEXT, {"Content-Type": kind})
    assert reply.status == 400
    assert "application/json" in reply.error["message"]


# --- fields -------------------------------------------------------------------------------------

BAD_COMMON: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "3"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 5_000_000}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["x"] * 500_000}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [0] * 129}, "stop_token_ids"),
    ({"temprature": 1}, "temprature"),
    ({"x" * 10_000: 1}, "x" * 100),
    ({"user": 5}, "user"),
    ({"cache_salt": "victim"}, "cache_salt"),
    ({"priority": -5}, "priority"),
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [SECRET] * 12_000}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
    ({"prompt": "x"}, "prompt"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"logprobs": 0}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 100_000}, "top_logprobs"),
    ({"store": True}, "store"),
    ({"modalities": ["text", "audio"]}, "modalities"),
]
BAD_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": ["x", 1]}, "prompt"),
    ({"prompt": ["x", [1]]}, "prompt"),
    ({"prompt": [{}]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [[1], [2**31]]}, "prompt[1]"),
    ({"prompt": ["x"] * 17}, "prompt"),
    ({"prompt": ["x"] * 4, "n": 5}, "n"),
    ({"prompt": ["x"] * 100_000}, "prompt"),
    ({"prompt": [1, 2], "echo": True}, "echo"),
    ({"suffix": "y"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"bad_words": ["x"] * 50_000}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"max_completion_tokens": 4}, "max_completion_tokens"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        *((CHAT_PATH, *case) for case in BAD_COMMON + BAD_CHAT),
        *((TEXT_PATH, *case) for case in BAD_COMMON + BAD_TEXT),
    ],
)
def test_bad_fields(
    gateway: RunningGateway,
    upstream: FakeUpstream,
    path: str,
    change: dict[str, Any],
    param: str,
    stream: bool,
) -> None:
    """V1, V2, V4: by name, before anything is sent upstream, and without echoing what was sent."""
    if stream and "stream" not in change and "stream_options" not in change:
        change = {**change, "stream": True}
    base = CHAT if path == CHAT_PATH else TEXT
    reply = call(gateway, "POST", path, {**base, **change})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param
    assert len(reply.body) < 600
    assert SECRET.encode() not in reply.body
    assert not upstream.received


@pytest.mark.parametrize(
    ("path", "name"),
    [(CHAT_PATH, name) for name in CHAT_REFUSED] + [(TEXT_PATH, n) for n in COMPLETION_REFUSED],
)
def test_unsupported_fields_are_refused_by_name(
    gateway: RunningGateway, path: str, name: str
) -> None:
    base = CHAT if path == CHAT_PATH else TEXT
    reply = call(gateway, "POST", path, {**base, name: "something"})
    assert reply.status == 400
    assert reply.error["param"] == name
    assert reply.error["code"] == "unsupported_parameter"
    assert reply.error["message"].startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        (
            "response_format",
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "nonsense"}},
            },
        ),
        ("guided_json", {"$ref": "#/missing"}),
        ("guided_regex", "("),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_v5_v6_constraints_are_refused_and_never_dropped(
    gateway: RunningGateway, upstream: FakeUpstream, name: str, value: object, stream: bool
) -> None:
    """V5, V6: whether they are valid or not; free text with 200 is what a client must not get."""
    reply = call(gateway, "POST", CHAT_PATH, {**CHAT, "stream": stream, name: value})
    assert (reply.status, reply.error["param"]) == (400, name)
    assert not upstream.received


def test_unknown_models_and_endpoints(gateway: RunningGateway) -> None:
    for path, base in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT), ("/tokenize", {"prompt": "x"})):
        reply = call(gateway, "POST", path, {**base, "model": "gpt-99"})
        assert reply.status == 404
        assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")
    assert call(gateway, "GET", "/v1/nothing").error["type"] == "invalid_request_error"
    reply = call(gateway, "GET", CHAT_PATH)
    assert reply.status == 405
    assert reply.error["message"]
    assert call(gateway, "GET", "/docs").status == 404  # it would load scripts from elsewhere


def test_the_openapi_document_says_what_happens(gateway: RunningGateway) -> None:
    document = call(gateway, "GET", "/openapi.json").json
    assert set(document["paths"]) >= {CHAT_PATH, TEXT_PATH, "/v1/models", "/ready", "/metrics"}
    for path in document["paths"].values():
        for operation in path.values():
            assert set(operation["responses"]) == {"200", "default"}
    schemas = document["components"]["schemas"]
    assert set(schemas["Error"]["properties"]["error"]["required"]) == {
        *call(gateway, "GET", "/nope").error
    }
    assert schemas["ChatRequest"]["required"] == ["model", "messages"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert not [name for name in schemas if "Validation" in name]


# --- errors of the server -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("step", "status", "param", "code"),
    [
        (("error", f"{ENSEMBLE}max_tokens: got 9; no"), 400, "max_completion_tokens", None),
        (("error", f"{ENSEMBLE}messages[0].role: got 'x'"), 400, "messages[0].role", None),
        (
            ("error", f"{ENSEMBLE}prompt: got 9 tokens; the context holds 8"),
            400,
            "messages",
            "context_length_exceeded",
        ),
        (
            ("error", f"{ENSEMBLE}unsupported: penalties: not here"),
            400,
            "presence_penalty",
            "unsupported_parameter",
        ),
        (
            ("error", f"{ENSEMBLE}unsupported: logit_bias: not here"),
            400,
            "logit_bias",
            "unsupported_parameter",
        ),
        (("error", "8 requests are waiting (max_queue 8); retry later"), 503, None, "overloaded"),
        (("error", f"{ENSEMBLE}not finished within 2 s of arrival"), 504, None, "timeout"),
        (("error", f"{ENSEMBLE}internal error: KeyError"), 500, None, "upstream_error"),
        (("abort", (grpc.StatusCode.UNAVAILABLE, "10.1.2.3 gone")), 503, None,
         "upstream_unavailable"),
    ],
)  # fmt: skip
def test_upstream_errors(
    gateway: RunningGateway,
    upstream: FakeUpstream,
    step: tuple[str, Any],
    status: int,
    param: str | None,
    code: str | None,
    stream: bool,
) -> None:
    """Before anything was streamed the status says what happened, in both modes."""
    upstream.script = failing(step)
    body = {**CHAT, "max_completion_tokens": 9, "presence_penalty": 1, "stream": stream}
    reply = call(gateway, "POST", CHAT_PATH, body)
    assert reply.status == status
    assert (reply.error["param"], reply.error["code"]) == (param, code)
    assert "ensemble" not in reply.error["message"]
    assert "10.1.2.3" not in reply.error["message"]  # the inside of our network
    assert ("retry-after" in reply.headers) == (status == 503)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (("error", f"{ENSEMBLE}computing this request failed: boom"), "boom"),
        (("abort", (grpc.StatusCode.UNAVAILABLE, "crash")), "cannot be reached"),
        (("abort", (grpc.StatusCode.UNKNOWN, "what")), "what"),
    ],
)
@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_t16_errors_in_a_stream_end_it(
    gateway: RunningGateway, upstream: FakeUpstream, path: str, step: tuple[str, Any], message: str
) -> None:
    upstream.script = failing(("chunk", ("a", (1,), "")), step)
    before = gateway.metric("pocketllm_gateway_stream_errors_total")
    base = CHAT if path == CHAT_PATH else TEXT
    reply = call(gateway, "POST", path, {**base, "stream": True})  # returns: the stream ended
    assert reply.status == 200
    assert message in reply.events[-1]["error"]["message"]
    assert "[DONE]" not in reply.events
    assert gateway.metric("pocketllm_gateway_stream_errors_total") == before + 1


def test_t14_a_stream_without_a_final_response(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    upstream.script = failing(("chunk", ("a", (1,), "")))
    reply = call(gateway, "POST", CHAT_PATH, {**CHAT, "stream": True})
    assert "error" in reply.events[-1]
    assert call(gateway, "POST", CHAT_PATH, CHAT).status == 503


def test_an_upstream_that_comes_back_is_used_again(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    """Requests that have not streamed are retried; the client notices nothing."""
    script = upstream.script

    def flaky(received: Any) -> Iterator[tuple[str, Any]]:
        if len(upstream.received) == 1:
            return iter([("abort", (grpc.StatusCode.UNAVAILABLE, "restarting"))])
        return script(received)

    upstream.script = flaky
    reply = call(gateway, "POST", CHAT_PATH, {**CHAT, "stream": True})
    assert reply.events[-1] == "[DONE]"
    assert len(upstream.received) == 2


def test_no_upstream_at_all() -> None:
    settings = GatewaySettings(upstream="127.0.0.1:9", ready_cache_seconds=0)
    with RunningGateway(settings) as gateway:
        reply = call(gateway, "POST", CHAT_PATH, CHAT)
        assert reply.status == 503
        assert reply.error["code"] == "upstream_unavailable"
        assert call(gateway, "GET", "/ready").error["code"] == "not_ready"
        assert call(gateway, "GET", "/health").status == 200  # the gateway itself is fine


# --- limits -------------------------------------------------------------------------------------


def test_body_limit_declared_and_not(upstream: FakeUpstream) -> None:
    settings = GatewaySettings(upstream=upstream.address, max_body_bytes=2000)
    with RunningGateway(settings) as gateway:
        large = {**TEXT, "prompt": "x" * 3000}
        reply = call(gateway, "POST", TEXT_PATH, large)
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=WAIT) as connection:
            connection.sendall(
                f"POST {TEXT_PATH} HTTP/1.1\r\nHost: localhost\r\n"
                "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            )
            for _ in range(3):
                connection.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
            assert b" 413 " in read_until(connection, b"body_too_large")
        assert call(gateway, "POST", TEXT_PATH, TEXT).status == 200
    assert len(upstream.received) == 1


def test_a_body_that_never_comes(upstream: FakeUpstream) -> None:
    with (
        RunningGateway(GatewaySettings(upstream=upstream.address, body_seconds=0.2)) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), timeout=WAIT) as connection,
    ):
        connection.sendall(
            f"POST {TEXT_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n".encode()
        )
        assert b" 408 " in read_until(connection, b"body_timeout")


def test_too_many_requests_in_flight(upstream: FakeUpstream) -> None:
    upstream.script = wait_first
    settings = GatewaySettings(upstream=upstream.address, max_in_flight=2)
    with RunningGateway(settings) as gateway:
        opened = [open_request(gateway, CHAT_PATH, CHAT) for _ in range(2)]
        upstream.wait_for_requests(2)
        reply = call(gateway, "POST", CHAT_PATH, CHAT)
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert reply.headers["retry-after"] == "1"
        upstream.release()
        for connection in opened:
            assert b"late" in read_until(connection, b"late")
            connection.close()
        upstream.script = failing(("chunk", ("a", (1,), "stop")))
        assert call(gateway, "POST", CHAT_PATH, CHAT).status == 200


def test_the_timeout_of_requests(upstream: FakeUpstream) -> None:
    upstream.script = wait_first
    with RunningGateway(GatewaySettings(upstream=upstream.address, request_timeout=0.3)) as gateway:
        for stream in (False, True):
            reply = call(gateway, "POST", CHAT_PATH, {**CHAT, "stream": stream})
            assert (reply.status, reply.error["code"]) == (504, "timeout")
        assert upstream.received[0].parameters["timeout_ms"] <= 300
        upstream.wait_for(
            lambda: {r.id for r in upstream.received} <= set(upstream.cancelled_ids),
            "both are cancelled",
        )


def test_error_bodies_are_small_whatever_was_sent(gateway: RunningGateway) -> None:
    body = {**CHAT, "model": "m" * 200}
    assert len(call(gateway, "POST", CHAT_PATH, body).body) < 500
    body = {**CHAT, "model": "m" * 100_000}
    reply = call(gateway, "POST", CHAT_PATH, body)
    assert reply.status == 400
    assert len(reply.body) < 500
    assert json.loads(reply.body)["error"]["param"] == "model"
