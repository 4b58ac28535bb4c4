"""The web console without a browser: what is served, how it is guarded, and its figures."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess

import pytest
from fake_upstream import FakeUpstream
from gateway_server import RunningGateway, call

from pocket_client.gateway.auth import ApiKeys, entry_of
from pocket_client.gateway.console import figures
from pocket_client.gateway.console.pages import CONSOLE_PATHS, STATIC
from pocket_client.gateway.settings import GatewaySettings

KEY = "pk-test"
MOST_BYTES = 300_000
STATS = {
    "running": 3,
    "waiting": 2,
    "slots_total": 8,
    "blocks_total": 100,
    "blocks_used": 40,
    "blocks_cached": 10,
    "blocks_free": 50,
    "generated_tokens": 1234,
    "prefix_query_tokens": 200,
    "prefix_hit_tokens": 50,
    "histograms": {
        "pocket_inter_token_latency_seconds": {
            "count": 10,
            "sum": 0.5,
            "bounds": [0.01, 0.1],
            "counts": [2, 7, 1],
        }
    },
}


def test_the_page_and_all_that_it_names_are_served(gateway: RunningGateway) -> None:
    page = call(gateway, "GET", "/")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="(console/[^"]+)"', page.body.decode())
    for script in STATIC.glob("js/*.js"):
        for name in re.findall(r'from "\.\.?/([^"]+)"', script.read_text(encoding="utf-8")):
            named.append(f"console/{name if name.startswith('vendor') else f'js/{name}'}")
    assert {"console/js/main.js", "console/vendor/marked.js"} <= set(named)
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    for path in set(named):
        reply = call(gateway, "GET", f"/{path}")
        assert reply.status == 200, path
        assert reply.headers["content-type"].startswith(kinds[path[path.rindex(".") :]])
        assert reply.body == (STATIC / path.removeprefix("console/")).read_bytes()


def test_a_strict_content_security_policy(gateway: RunningGateway) -> None:
    for path in sorted(CONSOLE_PATHS):
        headers = call(gateway, "GET", path).headers
        policy = dict(
            part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_no_inline_script_and_nothing_from_elsewhere() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"\s(?:style|on\w+)=", page)
    for path in (*STATIC.glob("*.*"), *STATIC.glob("js/*"), *STATIC.glob("css/*")):
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://\w|url\(|@import|innerHTML|\beval\b", text), path.name


def test_small_and_as_pinned() -> None:
    """``tools/vendor_console.py`` makes the libraries' files and their checksums from npm."""
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) < MOST_BYTES
    vendor = STATIC / "vendor"
    listed = dict(
        reversed(line.split()) for line in (vendor / "SHA256SUMS").read_text("ascii").splitlines()
    )
    found = {path.name for path in vendor.iterdir()} - {"SHA256SUMS"}
    assert found == listed.keys()
    for name, digest in listed.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name
    libraries = {name.split(".")[0] for name in found}
    assert {f"{library}.LICENSE" for library in libraries} <= found


def test_an_unchanged_file_is_not_sent_again(gateway: RunningGateway) -> None:
    first = call(gateway, "GET", "/console/js/main.js")
    again = call(
        gateway, "GET", "/console/js/main.js", headers={"If-None-Match": first.headers["etag"]}
    )
    assert (again.status, again.body) == (304, b"")
    other = call(gateway, "GET", "/console/js/main.js", headers={"If-None-Match": '"else"'})
    assert other.status == 200
    assert call(gateway, "HEAD", "/").body == b""


@pytest.mark.parametrize(
    "path",
    [
        "/console/",
        "/console/none.js",
        "/console/..%2f..%2fpages.py",
        "/console/vendor/marked.LICENSE",
    ],
)
def test_nothing_else_is_served(gateway: RunningGateway, path: str) -> None:
    reply = call(gateway, "GET", path)
    assert reply.status == 404
    assert reply.error["type"] == "invalid_request_error"


def test_files_need_no_key_and_figures_do(upstream: FakeUpstream) -> None:
    keys = ApiKeys.parse([entry_of("a", KEY)])
    with RunningGateway(GatewaySettings(upstream=upstream.address, api_keys=keys)) as gateway:
        assert call(gateway, "GET", "/").status == 200
        assert call(gateway, "GET", "/console/js/main.js").status == 200
        assert call(gateway, "GET", "/console/metrics").status == 401
        assert call(gateway, "GET", "/console/none.js").status == 401
        given = {"Authorization": f"Bearer {KEY}"}
        assert call(gateway, "GET", "/console/metrics", headers=given).status == 200


def test_the_host_is_checked_without_keys(gateway: RunningGateway) -> None:
    reply = call(gateway, "GET", "/", headers={"Host": "evil.example"})
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


def test_it_can_be_left_out(upstream: FakeUpstream) -> None:
    settings = GatewaySettings(upstream=upstream.address, console=False)
    with RunningGateway(settings) as gateway:
        for path in ("/", "/console/js/main.js", "/console/metrics"):
            assert call(gateway, "GET", path).status == 404
        assert call(gateway, "GET", "/health").status == 200


def test_figures(upstream: FakeUpstream) -> None:
    asked = []

    def stats() -> dict[str, object]:
        asked.append(1)
        return STATS

    upstream.stats, before = stats, upstream.stats
    try:
        two = GatewaySettings(upstream=f"{upstream.address},localhost:{upstream.port}")
        with RunningGateway(two) as gateway:
            body = {"model": "pocketllm", "prompt": "x", "stream": True}
            assert call(gateway, "POST", "/v1/completions", body).status == 200
            first = call(gateway, "GET", "/console/metrics")
            asked_first = len(asked)
            again = call(gateway, "GET", "/console/metrics")
    finally:
        upstream.stats = before
    assert first.headers["cache-control"] == "no-store"
    shown = first.json
    assert shown["model"] == "pocketllm"
    assert [server["healthy"] for server in shown["servers"]] == [True, True]
    engine = shown["engine"]
    assert (engine["running"], engine["waiting"], engine["generated_tokens"]) == (6, 4, 2468)
    assert engine["blocks_used"] + engine["blocks_cached"] + engine["blocks_free"] == 200
    assert shown["latencies"]["inter_token"] == {"bounds": [0.01, 0.1], "counts": [4, 14, 2]}
    first_token = shown["latencies"]["first_token"]
    assert sum(first_token["counts"]) == shown["gateway"]["first_token_count"] == 1
    assert len(first_token["counts"]) == len(first_token["bounds"]) + 1
    assert shown["gateway"]["in_flight"] == 0
    if again.json["time"] == shown["time"]:  # within half a second of each other
        assert len(asked) == asked_first


@pytest.mark.parametrize(
    "other", [{}, {"bounds": [0.01], "counts": [1, 1]}, {"bounds": [0.01, 0.1], "counts": [1]}, 3]
)
def test_other_buckets_are_not_added_up(other: object) -> None:
    """Servers of several versions during a rolling update."""
    name = "pocket_inter_token_latency_seconds"
    assert figures._inter_token([STATS]) == {"bounds": [0.01, 0.1], "counts": [2, 7, 1]}
    assert figures._inter_token([STATS, {"histograms": {name: other}}]) is None
    assert figures._inter_token([]) is None


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_percentiles_of_the_page_are_those_of_prometheus() -> None:
    """By hand, as histogram_quantile defines them: 10 values in (1, 2], 10 in (2, 4] seconds."""
    script = """
        import { pointOf, quantile } from "./rates.js";
        const bounds = [1, 2, 4];
        const of = (...counts) => ({ bounds, counts });
        const sample = (time, counts) => ({
            time, engine: { steps: time, running: 1, waiting: 0 }, gateway: { waiting: 0 },
            latencies: { first_token: of(...counts), inter_token: null } });
        console.log(JSON.stringify([
            quantile(0.5, null, of(0, 10, 10, 0)),
            quantile(0.95, null, of(0, 10, 10, 0)),
            quantile(0.5, of(0, 10, 0, 0), of(0, 10, 4, 0)),
            quantile(0.5, null, of(4, 0, 0, 0)),
            quantile(0.95, null, of(1, 0, 0, 9)),
            quantile(0.5, null, of(0, 0, 0, 0)),
            quantile(0.5, of(5, 0, 0, 0), of(1, 9, 0, 0)),
            quantile(0.5, null, null),
            pointOf(sample(1, [1, 0, 0, 0]), sample(2, [1, 2, 0, 0])).first50,
            pointOf(null, sample(2, [1, 2, 0, 0])).first50 ?? null,
        ]));
    """
    run = subprocess.run(
        ["node", "--input-type=module", "-"],
        input=script,
        cwd=STATIC / "js",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(run.stdout) == [2000, 3800, 3000, 500, 4000, None, None, None, 1500, None]


def test_figures_while_the_server_is_away() -> None:
    with RunningGateway(GatewaySettings(upstream="127.0.0.1:1")) as gateway:
        shown = call(gateway, "GET", "/console/metrics").json
    assert shown["engine"] is None
    assert [server["healthy"] for server in shown["servers"]] == [False]
