"""Requests and tokens per minute: what is taken, given back, owed, and said in headers."""

from __future__ import annotations

import pytest
from fake_upstream import WORDS, FakeUpstream, failing, two_then_wait, wait_first
from gateway_server import Reply, RunningGateway, call, eventually, open_request, read_until

from pocket_client.gateway.auth import ANONYMOUS, ApiKeys, entry_of
from pocket_client.gateway.settings import GatewaySettings

LIMIT = 6000
COMPLETION = {"model": "pocketllm", "prompt": "x " * 40, "max_tokens": 1000}
EXPECTED = 20 + 1000
USED = 40 + len(WORDS)


def limited(upstream: FakeUpstream, **options: object) -> RunningGateway:
    """Its clock stands still, so nothing comes back."""
    gateway = RunningGateway(GatewaySettings(upstream=upstream.address, **options))  # type: ignore[arg-type]
    gateway.app.state.service.rate_limiter._clock = lambda: 0.0
    return gateway


def complete(gateway: RunningGateway, **fields: object) -> Reply:
    return call(gateway, "POST", "/v1/completions", {**COMPLETION, **fields})


def left(gateway: RunningGateway) -> int:
    limiter = gateway.app.state.service.rate_limiter
    return int(limiter.headers(ANONYMOUS.name)["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_taken_and_settled(upstream: FakeUpstream, stream: bool) -> None:
    with limited(upstream, tokens_per_minute=LIMIT, requests_per_minute=60) as gateway:
        reply = complete(gateway, stream=stream)
        assert reply.status == 200
        assert reply.headers["x-ratelimit-limit-tokens"] == str(LIMIT)
        assert reply.headers["x-ratelimit-remaining-tokens"] == str(LIMIT - EXPECTED)
        assert reply.headers["x-ratelimit-reset-tokens"] == "11s"
        assert reply.headers["x-ratelimit-limit-requests"] == "60"
        assert reply.headers["x-ratelimit-remaining-requests"] == "9"
        assert reply.headers["x-ratelimit-reset-requests"] == "1s"
        assert left(gateway) == LIMIT - USED


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/completions", {"prompt": "abcd" * 30}, 30 + 16),
        ("/v1/completions", {"prompt": "é" * 30, "max_tokens": 5}, 15 + 5),
        ("/v1/completions", {"prompt": [[7] * 30, [8] * 20], "max_tokens": 5, "n": 2}, 50 + 20),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 400}]}, 109),
        ("/v1/responses", {"input": "x" * 400, "max_output_tokens": 50}, 159),
    ],
)
def test_what_is_expected_of_a_request(
    upstream: FakeUpstream, path: str, fields: dict[str, object], expected: int
) -> None:
    with limited(upstream, tokens_per_minute=60) as gateway:
        gateway.app.state.service.rate_limiter.admit(ANONYMOUS.name, 60).settle(10_000)
        reply = call(gateway, "POST", path, {"model": "pocketllm", **fields})
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        assert f"limit 60, 0 left, {min(expected, 60)} needed" in reply.error["message"]
    with limited(upstream, tokens_per_minute=LIMIT) as gateway:
        reply = call(gateway, "POST", path, {"model": "pocketllm", **fields})
        assert int(reply.headers["x-ratelimit-remaining-tokens"]) == LIMIT - expected


def test_beyond_the_rate_is_429_with_what_helps(upstream: FakeUpstream) -> None:
    keys = ApiKeys.parse([entry_of("alice", "one"), entry_of("alice", "two"), entry_of("bob", "3")])
    with limited(upstream, tokens_per_minute=LIMIT, api_keys=keys) as gateway:

        def ask(key: str) -> Reply:
            body = {**COMPLETION, "max_tokens": LIMIT}
            headers = {"Authorization": f"Bearer {key}"}
            return call(gateway, "POST", "/v1/completions", body, headers)

        limiter = gateway.app.state.service.rate_limiter
        limiter.admit("alice", LIMIT).settle(2 * LIMIT)
        reply = ask("one")
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        assert reply.error["message"].startswith(
            f"tokens per minute: limit {LIMIT}, 0 left, {LIMIT} needed; there is room in 2m0s"
        )
        assert reply.headers["retry-after"] == "120"
        assert reply.headers["x-ratelimit-remaining-tokens"] == "0"
        assert ask("two").status == 429  # the same tenant
        assert ask("3").status == 200
        assert len(upstream.received) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_costs_nothing(upstream: FakeUpstream, stream: bool) -> None:
    upstream.script = failing(("error", "max_tokens: got 1000; must be at most 5"))
    with limited(upstream, tokens_per_minute=LIMIT) as gateway:
        assert complete(gateway, stream=stream).status == 400
        assert left(gateway) == LIMIT


def test_a_broken_stream_costs_what_it_had(upstream: FakeUpstream) -> None:
    upstream.script = failing(("chunk", ("one", (1,), "")), ("error", "internal error: boom"))
    with limited(upstream, tokens_per_minute=LIMIT) as gateway:
        assert complete(gateway, stream=True).status == 200
        assert left(gateway) == LIMIT - 40 - 1


def test_leaving_a_stream_costs_what_was_seen(upstream: FakeUpstream) -> None:
    upstream.script = two_then_wait
    with limited(upstream, tokens_per_minute=LIMIT) as gateway:
        client = open_request(gateway, "/v1/completions", {**COMPLETION, "stream": True})
        read_until(client, b" two")
        assert left(gateway) == LIMIT - EXPECTED
        client.close()
        metric = "pocketllm_gateway_client_disconnects_total"
        eventually(lambda: gateway.metric(metric) == 1, "noticed")
        assert left(gateway) == LIMIT - 40 - 2


def test_leaving_before_the_first_token_costs_what_was_taken(upstream: FakeUpstream) -> None:
    """The server has computed nobody knows how much."""
    upstream.script = wait_first
    with limited(upstream, tokens_per_minute=LIMIT) as gateway:
        client = open_request(gateway, "/v1/completions", COMPLETION)
        upstream.wait_for_requests(1)
        client.close()
        metric = "pocketllm_gateway_client_disconnects_total"
        eventually(lambda: gateway.metric(metric) == 1, "noticed")
        assert left(gateway) == LIMIT - EXPECTED


def test_who_never_got_a_place_pays_nothing(upstream: FakeUpstream) -> None:
    upstream.script = wait_first
    with (
        limited(upstream, tokens_per_minute=LIMIT, max_in_flight=1) as gateway,
        open_request(gateway, "/v1/completions", COMPLETION) as first,
    ):
        upstream.wait_for_requests(1)
        reply = complete(gateway)
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert left(gateway) == LIMIT - EXPECTED
        upstream.release()
        read_until(first, b"late")


def test_without_limits_there_are_no_such_headers(gateway: RunningGateway) -> None:
    assert not [name for name in complete(gateway).headers if name.startswith("x-ratelimit")]
