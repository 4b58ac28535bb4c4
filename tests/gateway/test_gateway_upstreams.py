"""Several servers behind one gateway: affinity, failover, health, draining; queue and rates."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
import pytest
from fake_upstream import WORDS, FakeUpstream, failing, two_then_wait, wait_first, words
from gateway_server import Reply, RunningGateway, call, eventually, open_request, read_until

from pocket_client.errors import UnavailableError
from pocket_client.gateway.affinity import KNOWN_SLACK
from pocket_client.gateway.auth import ApiKeys, entry_of
from pocket_client.gateway.discovery import UpstreamNames, parse_upstreams, resolve
from pocket_client.gateway.metrics import Metrics
from pocket_client.gateway.settings import GatewaySettings
from pocket_client.gateway.upstreams import UpstreamPool
from pocket_client.options import text_request
from pocket_client.retry import RetryPolicy

TEXT = "".join(WORDS)
GONE = failing(("abort", (grpc.StatusCode.UNAVAILABLE, "restarting")))


@pytest.fixture(scope="module")
def _three() -> Iterator[list[FakeUpstream]]:
    made = [FakeUpstream() for _ in range(3)]
    yield made
    for server in made:
        server.close()


@pytest.fixture
def three(_three: list[FakeUpstream]) -> Iterator[list[FakeUpstream]]:
    """Servers with nothing received yet."""
    for server in _three:
        server.script = words
        server.received.clear()
        server.controls.clear()
    yield _three
    for server in _three:
        server.release()


@pytest.fixture
def balanced(three: list[FakeUpstream]) -> Iterator[RunningGateway]:
    with RunningGateway(GatewaySettings(upstream=",".join(s.address for s in three))) as running:
        yield running


def complete(gateway: RunningGateway, prompt: str, **body: object) -> Reply:
    return call(
        gateway, "POST", "/v1/completions", {"model": "pocketllm", "prompt": prompt, **body}
    )


def received(servers: list[FakeUpstream]) -> list[int]:
    return [len(server.received) for server in servers]


def test_a_prefix_stays_with_its_server(
    balanced: RunningGateway, three: list[FakeUpstream]
) -> None:
    for i in range(6):
        assert complete(balanced, "a long common beginning " * 20 + str(i)).status == 200
    assert sorted(received(three)) == [0, 0, 6]
    for i in range(30):
        complete(balanced, f"{i} quite another text")
    assert min(received(three)) >= 2


def test_a_popular_prefix_spills_when_its_server_is_busy(
    balanced: RunningGateway, three: list[FakeUpstream]
) -> None:
    for server in three:
        server.script = two_then_wait
    body = {"model": "pocketllm", "prompt": "the same", "stream": True}
    connections = []
    for _ in range(12):
        connections.append(open_request(balanced, "/v1/completions", body))
        read_until(connections[-1], b" two")
    # Seven where it belongs, then one other server has it, too, and catches up.
    assert sorted(received(three)) == [0, 5, KNOWN_SLACK + 1]
    for server in three:
        server.release()
    for connection in connections:
        read_until(connection, b"[DONE]")
        connection.close()


def test_a_server_that_is_gone_costs_nobody_an_answer(
    balanced: RunningGateway, three: list[FakeUpstream]
) -> None:
    three[0].script = GONE
    statuses = []
    while len(three[0].received) < 3 and len(statuses) < 200:
        statuses.append(complete(balanced, f"{len(statuses)} prompts", stream=True).events[-1])
    assert set(statuses) == {"[DONE]"}
    failures = balanced.metric(
        "pocketllm_gateway_upstream_requests_total",
        upstream=three[0].address,
        outcome="UnavailableError",
    )
    assert failures == len(three[0].received) == 3
    assert not balanced.app.state.service.client.upstreams[0].breaker.closed
    three[0].script = words

    numbers = itertools.count()

    def answered_again() -> bool:
        complete(balanced, f"{next(numbers)} more")
        return balanced.metric(
            "pocketllm_gateway_upstream_requests_total",
            upstream=three[0].address,
            outcome="answered",
        ) > 0  # fmt: skip

    eventually(answered_again, "the server is used again")


def test_a_full_server_is_left_for_another(
    balanced: RunningGateway, three: list[FakeUpstream]
) -> None:
    busy = failing(("error", "8 requests are waiting; retry later"))
    three[0].script = three[1].script = busy
    assert [complete(balanced, f"{i} prompts").status for i in range(10)] == [200] * 10
    three[2].script = busy
    reply = complete(balanced, "x")
    assert (reply.status, reply.error["code"]) == (503, "overloaded")
    assert reply.headers["retry-after"] == "1"


def test_each_attempt_has_its_own_id(balanced: RunningGateway, three: list[FakeUpstream]) -> None:
    for server in three[:2]:
        server.script = GONE
    for i in range(12):
        complete(balanced, f"{i} prompts")
    ids = [one.id for server in three for one in server.received]
    assert len(ids) == len(set(ids)) > 12


def test_nothing_is_repeated_after_the_first_token(
    balanced: RunningGateway, three: list[FakeUpstream]
) -> None:
    broken = failing(("chunk", ("one", (1,), "")), ("abort", (grpc.StatusCode.UNAVAILABLE, "died")))
    for server in three:
        server.script = broken
    reply = complete(balanced, "x", stream=True)
    assert reply.status == 200
    assert reply.events[0]["choices"][0]["text"] == "one"
    assert reply.events[-1]["error"]["code"] == "upstream_unavailable"
    assert sum(received(three)) == 1


def test_refusals_are_final(balanced: RunningGateway, three: list[FakeUpstream]) -> None:
    for server in three:
        server.script = failing(("error", "temperature: got 9; too hot"))
    assert complete(balanced, "x").status == 400
    assert sum(received(three)) == 1


def test_all_gone(balanced: RunningGateway, three: list[FakeUpstream]) -> None:
    """Even with every circuit open requests are tried, and the first answer closes it."""
    for server in three:
        server.script = GONE
    for _ in range(3):
        assert complete(balanced, "x").error["code"] == "upstream_unavailable"
    for server in three:
        server.script = words
    assert complete(balanced, "x").status == 200


def test_other_endpoints_use_any_server(three: list[FakeUpstream]) -> None:
    addresses = f"127.0.0.1:1,{three[0].address}"
    with RunningGateway(GatewaySettings(upstream=addresses)) as gateway:
        for _ in range(4):
            assert call(gateway, "POST", "/tokenize", {"prompt": "ab"}).json["tokens"] == [97, 98]
            assert call(gateway, "POST", "/detokenize", {"tokens": [97]}).json == {"prompt": "a"}
        assert call(gateway, "GET", "/ready").status == 200


def test_leaving_cancels_where_the_request_runs(
    balanced: RunningGateway, three: list[FakeUpstream]
) -> None:
    for server in three:
        server.script = wait_first
    body = {"model": "pocketllm", "prompt": "x"}
    connection = open_request(balanced, "/v1/completions", body)
    eventually(lambda: sum(received(three)) == 1, "sent")
    [server] = [server for server in three if server.received]
    connection.close()
    server.wait_for(lambda: bool(server.cancelled_ids), "cancelled on its server")
    assert not any(other.cancelled_ids for other in three if other is not server)


# --- the pool itself: health and names ------------------------------------------------------------


def on_pool(
    names: UpstreamNames, check: Callable[[UpstreamPool], object], **options: object
) -> None:
    """Run ``check(pool)``, a coroutine function, with a started pool."""

    async def main() -> None:
        metrics = Metrics()
        pool = UpstreamPool(names, metrics, retry=RetryPolicy(attempts=3), **options)  # type: ignore[arg-type]
        await pool.start()
        try:
            await check(pool)  # type: ignore[misc]
        finally:
            await pool.aclose()

    asyncio.run(main())


async def until(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


def test_unhealthy_servers_get_nothing(three: list[FakeUpstream]) -> None:
    names = UpstreamNames((three[0].address, "127.0.0.1:1"))

    async def check(pool: UpstreamPool) -> None:
        alive, dead = pool.upstreams
        await until(lambda: not dead.healthy, "noticed")
        for i in range(20):
            assert pool.choose(bytes([i]) * 16, set()) is alive
        assert pool.choose(bytes(16), {alive.address}) is dead  # better than nothing

    on_pool(names, check, health_seconds=0.02)


def test_names_come_and_go(three: list[FakeUpstream]) -> None:
    """An address that is gone from DNS finishes what it has, and gets nothing new."""
    listed = [three[0].address]
    asked: Counter[tuple[str, int]] = Counter()

    async def resolver(host: str, port: int) -> list[str]:
        asked[host, port] += 1
        if not listed:
            raise OSError("no such name")
        return list(listed)

    async def check(pool: UpstreamPool) -> None:
        three[0].script = two_then_wait
        stream = pool.send(text_request("x", {}, stream=True), timeout=30)
        texts = [(await stream.__anext__()).text]
        listed[:] = [three[1].address]
        await until(lambda: [u.address for u in pool.upstreams] == listed, "the list changed")
        other = pool.send(text_request("x", {}, stream=True), timeout=30)
        assert "".join([chunk.text async for chunk in other]) == TEXT
        three[0].release()
        texts += [chunk.text async for chunk in stream]
        assert "".join(texts) == "one two end"
        assert stream.completion.text == "one two end"
        assert set(pool._upstreams) == set(listed)
        listed.clear()  # DNS fails: what was known stays
        before = asked["triton", 8001]
        await until(lambda: asked["triton", 8001] > before + 1, "asked again")
        assert len(pool.upstreams) == 1

    names = parse_upstreams("dns://triton:8001")
    on_pool(names, check, resolver=resolver, dns_seconds=0.02, health_seconds=60)


def test_no_server_known() -> None:
    async def resolver(_host: str, _port: int) -> list[str]:
        raise OSError("no such name")

    async def check(pool: UpstreamPool) -> None:
        stream = pool.send(text_request("x", {}, stream=True), timeout=0.5)
        with pytest.raises(UnavailableError, match="no model server is known"):
            await stream.__anext__()

    on_pool(parse_upstreams("dns://nowhere"), check, resolver=resolver)


def test_names() -> None:
    assert parse_upstreams("a:1, b:2,a:1") == UpstreamNames(("a:1", "b:2"))
    assert parse_upstreams("dns://t:9") == UpstreamNames((), (("t", 9),))
    assert not parse_upstreams("a:1").may_be_several
    for text in ("", "a:1,", "ftp://x", "dns://", "dns://x:y", "dns://x/y"):
        with pytest.raises(ValueError, match="address: got"):
            parse_upstreams(text)
    assert asyncio.run(resolve("127.0.0.1", 5)) == ("127.0.0.1:5",)
    with pytest.raises(OSError):  # noqa: PT011  (whatever the resolver says)
        asyncio.run(resolve("no-such-name.invalid", 5))


# --- fair queue and rates through HTTP ------------------------------------------------------------

KEYS = {"a": "pk-aaaaaaaaaaaaaaaa", "b": "pk-bbbbbbbbbbbbbbbb"}


def guarded(upstream: FakeUpstream, **options: object) -> RunningGateway:
    keys = ApiKeys.parse([entry_of(name, key) for name, key in KEYS.items()])
    settings = GatewaySettings(upstream=upstream.address, api_keys=keys, **options)  # type: ignore[arg-type]
    return RunningGateway(settings)


def ask_as(gateway: RunningGateway, tenant: str, prompt: str) -> Reply:
    headers = {"Authorization": f"Bearer {KEYS[tenant]}"}
    body = {"model": "pocketllm", "prompt": prompt}
    return call(gateway, "POST", "/v1/completions", body, headers)


def test_places_go_round_the_tenants(upstream: FakeUpstream) -> None:
    upstream.script = wait_first
    with guarded(upstream, max_in_flight=1, max_waiting=4, max_waiting_per_tenant=3) as gateway:
        statuses: list[int] = []
        threads = []

        def waiting() -> float:
            return gateway.metric("pocketllm_gateway_generations_waiting")

        def send(tenant: str, prompt: str) -> None:
            run = lambda: statuses.append(ask_as(gateway, tenant, prompt).status)  # noqa: E731
            threads.append(threading.Thread(target=run))
            threads[-1].start()

        send("a", "a0")
        upstream.wait_for_requests(1)
        for i in range(1, 4):
            send("a", f"a{i}")
            eventually(lambda i=i: waiting() == i, "queued")
        refused = ask_as(gateway, "a", "a4")
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        send("b", "b0")
        eventually(lambda: waiting() == 4, "queued")
        full = ask_as(gateway, "b", "b1")
        assert (full.status, full.error["code"]) == (503, "overloaded")
        for count in range(1, 6):
            upstream.wait_for_requests(count)
            upstream.received[count - 1].released.set()
        for thread in threads:
            thread.join(20)
        order = [one.inputs["text_input"] for one in upstream.received]
        assert order == ["a0", "a1", "b0", "a2", "a3"]  # b came last and let a go first only once
        assert statuses == [200] * 5


def test_leaving_the_queue_and_waiting_too_long(upstream: FakeUpstream) -> None:
    upstream.script = wait_first
    settings = GatewaySettings(
        upstream=upstream.address, max_in_flight=1, max_waiting=2, max_wait_seconds=1.5
    )
    with RunningGateway(settings) as gateway:
        body = {"model": "pocketllm", "prompt": "x"}
        first = open_request(gateway, "/v1/completions", body)
        upstream.wait_for_requests(1)
        second = open_request(gateway, "/v1/completions", body)
        metric = "pocketllm_gateway_generations_waiting"
        eventually(lambda: gateway.metric(metric) == 1, "queued")
        second.close()
        eventually(lambda: gateway.metric(metric) == 0, "withdrawn")
        reply = complete(gateway, "late")
        assert (reply.status, reply.error["code"]) == (503, "overloaded")
        assert "no place was free for 1.5 s" in reply.error["message"]
        upstream.release()
        read_until(first, b"late")
        first.close()
        upstream.script = words
        assert complete(gateway, "after").status == 200
        assert len(upstream.received) == 2


def test_requests_per_minute(upstream: FakeUpstream) -> None:
    with guarded(upstream, requests_per_minute=12) as gateway:
        assert [ask_as(gateway, "a", "x").status for _ in range(2)] == [200, 200]
        reply = ask_as(gateway, "a", "x")
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(reply.headers["retry-after"]) <= 5
        assert ask_as(gateway, "b", "x").status == 200


@pytest.mark.parametrize(
    "options",
    [{"max_waiting": -1}, {"requests_per_minute": 0}, {"max_wait_seconds": 0}, {"upstream": "?"}],
)
def test_settings_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="got"):
        GatewaySettings(**options)  # type: ignore[arg-type]
