"""Who may do what: API keys, tenants' cache salts, hosts, origins, and the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvicorn
from fake_upstream import FakeUpstream, failing, wait_first, words
from gateway_server import WAIT, RunningGateway, call

from pocket_client.gateway.__main__ import main
from pocket_client.gateway.auth import ApiKeys, entry_of
from pocket_client.gateway.settings import GatewaySettings

CHAT = {"model": "pocketllm", "messages": [{"role": "user", "content": "x"}]}
PATH = "/v1/chat/completions"
KEYS = ApiKeys.parse(
    [
        "# two tenants",
        "",
        entry_of("alice", "key-one"),
        entry_of("alice", "key-two"),
        entry_of("bob", "key-three"),
    ]
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_are_needed_everywhere_but_for_probes(upstream: FakeUpstream) -> None:
    with RunningGateway(GatewaySettings(upstream=upstream.address, api_keys=KEYS)) as gateway:
        for method, path in (
            ("POST", PATH),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("DELETE", "/v1/requests/x"),
            ("GET", "/openapi.json"),
            ("GET", "/nothing"),
        ):
            for headers in ({}, bearer("wrong"), {"Authorization": "Basic key-one"}, bearer("")):
                reply = call(gateway, method, path, CHAT if method == "POST" else None, headers)
                assert reply.status == 401
                assert reply.error["code"] == "invalid_api_key"
                assert reply.headers["www-authenticate"] == "Bearer"
        assert not upstream.received
        for path in ("/health", "/ready"):
            assert call(gateway, "GET", path).status == 200
        upstream.received.clear()
        assert call(gateway, "POST", PATH, CHAT, bearer("key-one")).status == 200
        assert call(gateway, "GET", "/metrics", headers=bearer("key-three")).status == 200


def test_s7_tenants_do_not_share_cached_prefixes(upstream: FakeUpstream) -> None:
    """The salt follows the tenant: equal for one tenant's keys, different for another's."""
    with RunningGateway(GatewaySettings(upstream=upstream.address, api_keys=KEYS)) as gateway:
        for key in ("key-one", "key-two", "key-three", "key-one"):
            assert call(gateway, "POST", PATH, CHAT, bearer(key)).status == 200
        one, two, three, again = (r.parameters["cache_salt"] for r in upstream.received)
        assert one == two == again != three
        assert "alice" not in one
        reply = call(gateway, "POST", PATH, {**CHAT, "cache_salt": three}, bearer("key-one"))
        assert (reply.status, reply.error["param"]) == (400, "cache_salt")
    others = ApiKeys.parse([entry_of("alice", "key-one")])
    tenant = others.tenant_of("Bearer key-one")
    assert tenant is not None
    assert tenant.cache_salt != one  # another process, another secret


def test_a_tenant_has_its_own_limit(upstream: FakeUpstream) -> None:
    upstream.script = wait_first
    settings = GatewaySettings(upstream=upstream.address, api_keys=KEYS, max_in_flight_per_tenant=1)
    with RunningGateway(settings) as gateway, ThreadPoolExecutor(2) as pool:
        first = pool.submit(call, gateway, "POST", PATH, CHAT, bearer("key-one"))
        upstream.wait_for_requests(1)
        reply = call(gateway, "POST", PATH, CHAT, bearer("key-two"))  # the same tenant
        assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
        assert reply.headers["retry-after"] == "1"
        other = pool.submit(call, gateway, "POST", PATH, CHAT, bearer("key-three"))
        upstream.wait_for_requests(2)
        upstream.release()
        assert (first.result().status, other.result().status) == (200, 200)
        upstream.script = words
        assert call(gateway, "POST", PATH, CHAT, bearer("key-two")).status == 200


def test_gateways_with_one_secret_share_the_cache() -> None:
    made = [ApiKeys.parse([entry_of("a", "key")], b"s" * 16) for _ in range(2)]
    salts = {keys.tenant_of("Bearer key").cache_salt for keys in made}  # type: ignore[union-attr]
    assert len(salts) == 1


def test_without_keys_there_is_one_tenant_without_salt(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    assert call(gateway, "POST", PATH, CHAT, bearer("whatever")).status == 200
    assert "cache_salt" not in upstream.received[0].parameters


def test_keys_are_kept_as_hashes() -> None:
    assert "key-one" not in repr(KEYS)
    assert KEYS.secret.hex() not in repr(KEYS)


@pytest.mark.parametrize(
    "line", ["nonsense", "a:sha256:00", "a b:sha256:" + "0" * 64, "a:md5:" + "0" * 64]
)
def test_bad_key_entries(line: str) -> None:  # fmt: skip
    with pytest.raises(ValueError, match="API key 2") as caught:
        ApiKeys.parse([entry_of("ok", "x"), line])
    assert line not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9000", 200),
        ("127.0.0.1", 200),
        ("[::1]:9000", 200),
        ("ok.example:9000", 200),
        ("evil.example", 403),
        ("evil.example:9000", 403),
        ("localhost.evil.example", 403),
    ],
)
def test_foreign_host_names_are_refused_without_keys(
    upstream: FakeUpstream, host: str, status: int
) -> None:
    settings = GatewaySettings(upstream=upstream.address, allowed_hosts=("ok.example",))
    with RunningGateway(settings) as gateway:
        assert call(gateway, "GET", "/v1/models", headers={"Host": host}).status == status


def test_cors_is_off_unless_asked_for(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    origin = {"Origin": "https://app.example"}
    ask = {**origin, "Access-Control-Request-Method": "POST"}
    reply = call(gateway, "GET", "/v1/models", headers=origin)
    assert "access-control-allow-origin" not in reply.headers
    assert call(gateway, "OPTIONS", PATH, headers=ask).status == 405
    settings = GatewaySettings(
        upstream=upstream.address, cors_origins=("https://app.example",), api_keys=KEYS
    )
    with RunningGateway(settings) as open_gateway:
        reply = call(open_gateway, "OPTIONS", PATH, headers=ask)
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
        other = {**ask, "Origin": "https://evil.example"}
        reply = call(open_gateway, "OPTIONS", PATH, headers=other)
        assert "access-control-allow-origin" not in reply.headers


def test_readiness_is_a_cached_inference(upstream: FakeUpstream) -> None:
    settings = GatewaySettings(upstream=upstream.address, ready_cache_seconds=60)
    with RunningGateway(settings) as gateway:
        for _ in range(5):
            assert call(gateway, "GET", "/ready").json == {"status": "ready"}
        assert len(upstream.received) == 1
        assert upstream.received[0].parameters["max_tokens"] == 1


def test_readiness_sees_a_dead_model_but_not_a_busy_one(upstream: FakeUpstream) -> None:
    settings = GatewaySettings(upstream=upstream.address, ready_cache_seconds=0)
    with RunningGateway(settings) as gateway:
        upstream.script = failing(("error", "Request for unknown model: 'pocketllm' is not found"))
        assert call(gateway, "GET", "/ready").status == 503
        upstream.script = failing(("error", "8 requests are waiting; retry later"))
        assert call(gateway, "GET", "/ready").status == 200


def test_real_traffic_counts_as_a_probe(upstream: FakeUpstream) -> None:
    settings = GatewaySettings(upstream=upstream.address, ready_cache_seconds=60)
    with RunningGateway(settings) as gateway:
        assert call(gateway, "POST", PATH, CHAT).status == 200
        assert call(gateway, "GET", "/ready").status == 200
    assert len(upstream.received) == 1


# --- command line -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--host", "0.0.0.0"], "--allow-unauthenticated"),
        (["--host", "0.0.0.0", "--published-host", "0.0.0.0"], "POCKETLLM_API_KEYS"),
        (["--published-host", "192.0.2.1"], "--published-host 192.0.2.1 would be open"),
        (["--upstream", "ftp://x"], "address: got 'ftp://x'"),
        (["--max-choices", "0"], "max_choices"),
        (["--request-timeout", "-1"], "request_timeout"),
        (["--api-keys-file", "/nowhere"], "/nowhere"),
        (["--port", "many"], "--port"),
        (["--drain-seconds", "-1"], "--drain-seconds: got '-1'; must be a whole number"),
    ],
)
def test_wrong_usage(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "seconds"), [([], 30), (["--drain-seconds", "120"], 120)])
def test_open_answers_get_the_drain_that_was_asked_for(
    argv: list[str], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: started.append(server.config))
    assert main(argv) == 0
    assert [config.timeout_graceful_shutdown for config in started] == [seconds]


def test_a_container_without_keys_may_be_published_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: started.append(server.config))
    assert main(["--host", "0.0.0.0", "--published-host", "127.0.0.1"]) == 0
    monkeypatch.setenv("POCKETLLM_API_KEYS", entry_of("alice", "key-one"))
    assert main(["--host", "0.0.0.0", "--published-host", "0.0.0.0"]) == 0
    assert [config.host for config in started] == ["0.0.0.0", "0.0.0.0"]


def test_hash_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hash-key", "alice"]) == 0
    words = capsys.readouterr().out.split()
    key, entry = next(w for w in words if w.startswith("pk-")), words[-1]
    assert entry == entry_of("alice", key)
    assert main(["--hash-key", "two words"]) == 2


def test_it_starts_answers_and_stops(upstream: FakeUpstream, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(entry_of("alice", "key-one") + "\n")
    command = [sys.executable, "-m", "pocket_client.gateway"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--upstream", upstream.address, "--api-keys-file", str(keys)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "running on" in line.lower())
        port = int(line.split("http://127.0.0.1:")[1].split()[0])
        running = type("Running", (), {"port": port})
        assert call(running, "GET", "/v1/models").status == 401  # type: ignore[arg-type]
        reply = call(running, "POST", PATH, CHAT, bearer("key-one"))  # type: ignore[arg-type]
        assert reply.status == 200
    finally:
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=WAIT)
    assert process.returncode == 0
    assert "Traceback" not in rest
