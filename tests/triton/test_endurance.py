"""What must not grow: memory under load, and whatever a reload leaves behind."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from triton_clients import at_baseline, control, generate, grpc_stream, wait_for
from triton_models import load_all, resident_bytes, stubs_of, unload_all

from perf.load.fill import fill_pool
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports
from pocket_backend.triton.shm import SHM_DIR
from pocket_client import Client

MIB = 1 << 20
STREAMS = 8
WARM_UP_SECONDS = 30.0
LOAD_SECONDS = 60.0
MAX_GROWTH = 20 * MIB


@pytest.fixture
def small_pool_server(model_path: str, tmp_path: Path) -> Iterator[TritonServer]:
    """A KV pool that is filled in seconds: its pages are resident from then on."""
    options = ServerOptions(
        model_path,
        ports=Ports(0, 0, 0),
        log_file=tmp_path / "server.log",
        stop_timeout=5,
        environment={"POCKETLLM_KV_CACHE_TOKENS": "4096", "POCKETLLM_MAX_BATCH_SIZE": str(STREAMS)},
    )
    with TritonServer(options) as running:
        yield running


@pytest.mark.slow
def test_a_minute_of_full_load_adds_no_memory(small_pool_server: TritonServer) -> None:
    server = small_pool_server

    def client(number: int, until: float) -> int:
        rng = random.Random(number)
        for done in itertools.count():
            if time.monotonic() > until:
                return done
            ids = [rng.randrange(1000, 40000) for _ in range(rng.randrange(1, 200))]
            body = {"input_ids": ids, "max_tokens": rng.randrange(1, 100), "ignore_eos": True}
            assert grpc_stream(server.grpc_address, body).error is None
        return 0

    def load(seconds: float) -> int:
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(STREAMS) as pool:
            return sum(pool.map(client, range(STREAMS), [until] * STREAMS))

    with Client(server.grpc_address) as filler:
        assert fill_pool(filler).complete  # however slow the machine, which a time would depend on
    assert load(WARM_UP_SECONDS) >= STREAMS
    before = resident_bytes(server)
    assert load(LOAD_SECONDS) > STREAMS
    after = resident_bytes(server)
    assert (
        before.keys()
        == after.keys()
        == {"tritonserver", *("tokenizer", "generator", "detokenizer")}
    )
    growth = {name: (after[name] - before[name]) / MIB for name in before}
    assert max(growth.values()) <= MAX_GROWTH / MIB, growth
    wait_for(lambda: at_baseline(control(server.http_url, {"stats": True})), what="baseline")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_t3_two_thousand_responses_five_times_add_no_memory(tmp_path: Path) -> None:
    """T3: neither in a process nor in shared memory, once the first round has warmed it up. Half
    a KiB a response would show."""
    options = ServerOptions(
        "fake",
        ports=Ports(0, 0, 0),
        log_file=tmp_path / "server.log",
        stop_timeout=5,
        environment={"POCKETLLM_STREAM_INTERVAL_MS": "0"},
    )
    body = {"text_input": "abc", "max_tokens": 250, "ignore_eos": True}
    after: list[dict[str, int]] = []
    with TritonServer(options) as server, ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            responses = 0
            while responses < 2000:
                replies = list(pool.map(grpc_stream, [server.grpc_address] * 4, [body] * 4))
                assert all(reply.error is None for reply in replies)
                responses += sum(reply.responses for reply in replies)
            regions = SHM_DIR.glob(f"*{server.server_id}*")
            shared = sum(region.stat().st_blocks * 512 for region in regions)
            after.append({**resident_bytes(server), "shared memory": shared})
    growth = {name: (after[-1][name] - after[0][name]) / MIB for name in after[0]}
    assert max(growth.values()) <= 4, growth


@pytest.mark.slow
def test_t7_twenty_reloads(fresh_server: TritonServer) -> None:
    """T7: a reload ends the old processes, leaves no shared memory, and changes no answer."""
    server = fresh_server
    body = {"text_input": "abc", "max_tokens": 12}
    expected = generate(server.http_url, body).text
    regions: list[int] = []
    server_bytes: list[int] = []
    for _ in range(20):
        assert grpc_stream(server.grpc_address, body).text == expected
        unload_all(server)
        assert stubs_of(server) == []
        load_all(server)
        assert generate(server.http_url, body).text == expected
        assert len(stubs_of(server)) == 3
        regions.append(len(list(SHM_DIR.glob(f"*{server.server_id}*"))))
        server_bytes.append(resident_bytes(server)["tritonserver"])
    assert max(regions) == regions[0]
    assert server_bytes[-1] - server_bytes[4] <= MAX_GROWTH
