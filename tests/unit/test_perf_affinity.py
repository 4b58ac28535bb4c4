"""The comparison of affinity and round robin, on scripted servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from fake_upstream import FakeUpstream

from perf.bench_affinity import POOLS, Figures, Workload, measure, records, run

WORKLOAD = Workload(groups=4, questions=4, words=60, tokens=2, concurrency=1)


@pytest.fixture
def servers() -> Iterator[list[FakeUpstream]]:
    made = [FakeUpstream(), FakeUpstream()]
    yield made
    for server in made:
        server.close()


def groups(server: FakeUpstream) -> set[str]:
    return {str(received.inputs["messages"]).split(":")[3][:20] for received in server.received}


def test_only_affinity_keeps_a_group_on_one_server(servers: list[FakeUpstream]) -> None:
    addresses = [server.address for server in servers]
    for name, pool in POOLS.items():
        for server in servers:
            server.received.clear()
        asyncio.run(run(pool(addresses), WORKLOAD.requests("x", 0), WORKLOAD.concurrency))
        counts = [len(server.received) for server in servers]
        assert sum(counts) == 16
        shared = groups(servers[0]) & groups(servers[1])
        if name == "affinity":
            assert not shared
            assert len(groups(servers[0]) | groups(servers[1])) == 4
        else:
            assert counts == [8, 8]
            assert shared


def test_both_policies_get_the_same_order_and_prefixes_of_their_own() -> None:
    def shape(name: str, seed: int) -> list[str]:
        return [str(r.messages_json).replace(name, "") for r in WORKLOAD.requests(name, seed)]

    assert shape("aaa", 1) == shape("bbb", 1)
    assert shape("aaa", 1) != shape("aaa", 2)
    assert not {r.messages_json for r in WORKLOAD.requests("aaa", 1)} & {
        r.messages_json for r in WORKLOAD.requests("bbb", 1)
    }


def test_records(servers: list[FakeUpstream]) -> None:
    found = measure([server.address for server in servers], WORKLOAD, 2)
    assert {name: len(figures) for name, figures in found.items()} == dict.fromkeys(POOLS, 2)
    assert all(figure.ttft > 0 for figures in found.values() for figure in figures)
    made = records({"affinity": [Figures(0.5, 0.2, 2.0), Figures(0.7, 0.4, 3.0)]}, 4)
    assert [(r.metric, pytest.approx(r.value), r.unit) for r in made] == [
        ("cached_token_ratio", 0.6, "ratio"), ("ttft_seconds", 0.3, "seconds"),
        ("round_seconds", 2.5, "seconds"),
    ]  # fmt: skip
