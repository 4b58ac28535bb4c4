"""The server's counters against a client's own ledger: every request of a random mix is accounted
for, once, with its tokens.

What a client cannot know (how many tokens were made for it before it left, or before its deadline)
comes from the request's log line; for everybody else the log must say what the client saw.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from triton_clients import (
    GrpcStream,
    Reply,
    at_baseline,
    control,
    generate,
    generate_stream,
    grpc,
    grpc_stream,
    post,
    wait_for,
)
from triton_metrics import scrape

from pocket_backend.triton.launcher import TritonServer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
KINDS = ("generate", "sse", "grpc", "stop", "generator", "invalid", "unsupported", "invalid-direct",
         "deadline", "asked", "gone")  # fmt: skip
WEIGHTS = (20, 20, 20, 10, 10, 4, 3, 3, 4, 4, 4)


@dataclass
class Entry:
    """One request, as its client saw it end."""

    request_id: str
    kind: str
    outcome: str
    """A finish reason, or ``refused-<reason>``."""
    prompt_tokens: int = 0
    output_tokens: int | None = None
    """None: the client cannot know."""


@dataclass
class Client:
    """Sends one request of each kind and says what became of it."""

    server: TritonServer

    def run(self, request_id: str, kind: str, seed: int) -> Entry:
        draw = random.Random(seed)
        prompt = "".join(draw.choices(LETTERS, k=draw.randint(1, 60)))
        fields: dict[str, Any] = {
            "text_input": prompt,
            "max_tokens": draw.randint(1, 8),
            "seed": draw.getrandbits(32),
            "temperature": 1.0,
        }
        entry = Entry(request_id, kind, "", prompt_tokens=len(prompt))
        send = getattr(self, "_" + kind.replace("-", "_"))
        send(entry, fields)
        return entry

    # Each of these sets the entry's outcome.

    def _generate(self, entry: Entry, fields: dict[str, Any]) -> None:
        self._ended(entry, generate(self.server.http_url, {"id": entry.request_id, **fields}))

    def _sse(self, entry: Entry, fields: dict[str, Any]) -> None:
        body = {"id": entry.request_id, **fields}
        self._ended(entry, generate_stream(self.server.http_url, body))

    def _grpc(self, entry: Entry, fields: dict[str, Any]) -> None:
        reply = grpc_stream(self.server.grpc_address, fields, request_id=entry.request_id)
        self._ended(entry, reply)

    def _stop(self, entry: Entry, fields: dict[str, Any]) -> None:
        stops = list(LETTERS[:16])
        self._grpc(entry, {**fields, "max_tokens": 400, "stop": stops})
        assert entry.outcome == "stop"

    def _generator(self, entry: Entry, fields: dict[str, Any]) -> None:
        ids = list(fields.pop("text_input").encode())
        body = {"id": entry.request_id, "input_ids": ids, **fields}
        status, data = post(f"{self.server.http_url}/v2/models/generator/generate", body)
        assert status == 200, data
        reply = json.loads(data)
        entry.outcome, entry.output_tokens = reply["finish_reason"], reply["num_output_tokens"]

    def _invalid(self, entry: Entry, fields: dict[str, Any]) -> None:
        self._refused(entry, {**fields, "max_tokens": 0})

    def _unsupported(self, entry: Entry, fields: dict[str, Any]) -> None:
        self._refused(entry, {**fields, "beam_width": 2})

    def _invalid_direct(self, entry: Entry, fields: dict[str, Any]) -> None:
        body = {"id": entry.request_id, "input_ids": [1, 5000], "max_tokens": 2}
        reply = generate(self.server.http_url, body, "generator")
        assert reply.status == 400, reply
        entry.outcome = "refused-invalid"

    def _deadline(self, entry: Entry, fields: dict[str, Any]) -> None:
        fields = {**fields, "max_tokens": 3000, "ignore_eos": True, "timeout_ms": 60}
        reply = grpc_stream(self.server.grpc_address, fields, request_id=entry.request_id)
        assert reply.error is not None
        entry.outcome = "error"

    def _asked(self, entry: Entry, fields: dict[str, Any]) -> None:
        fields = {**fields, "stream": True, "max_tokens": 3000, "ignore_eos": True}
        address = self.server.grpc_address
        with GrpcStream(address, fields, request_id=entry.request_id) as stream:
            results = iter(stream)
            next(results)
            result = control(self.server.http_url, {"cancel_request_id": entry.request_id})
            assert result == {"cancelled": 1}
            with pytest.raises(grpc.InferenceServerException, match="cancelled"):
                list(results)
        entry.outcome = "cancelled"

    def _gone(self, entry: Entry, fields: dict[str, Any]) -> None:
        parts = urlsplit(self.server.http_url)
        body = {"id": entry.request_id, "stream": True, **fields, "max_tokens": 3000}
        data = json.dumps({**body, "ignore_eos": True}).encode()
        with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
            connection.sendall(
                b"POST /v2/models/pocketllm/generate_stream HTTP/1.1\r\nHost: x\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(data), data)
            )
            received = b""
            while b"text_output" not in received:
                received += connection.recv(4096)
        entry.outcome = "cancelled"

    def _refused(self, entry: Entry, fields: dict[str, Any]) -> None:
        reply = generate(self.server.http_url, {"id": entry.request_id, **fields})
        assert reply.status in (400, 501), reply
        entry.outcome = f"refused-{entry.kind}"

    @staticmethod
    def _ended(entry: Entry, reply: Reply) -> None:
        assert reply.error is None, reply.error
        assert reply.num_input_tokens == entry.prompt_tokens
        assert len(reply.token_ids) == reply.num_output_tokens
        entry.outcome, entry.output_tokens = reply.finish_reason, reply.num_output_tokens


def logged_requests(server: TritonServer) -> dict[str, dict[str, str]]:
    """The fields of each `request finished` line, by the client's id."""
    assert server.log_path is not None
    found = {}
    for line in server.log_path.read_text(errors="replace").splitlines():
        if " request finished " in line:
            pairs = dict(re.findall(r"(\w+)=(\S+)", line))
            found[pairs.get("client_request_id", "")] = pairs
    return found


@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_counters_agree_with_the_clients_ledger(fresh_server: TritonServer, count: int) -> None:
    """M3: counts agree exactly, over requests that end in every way."""

    def settled() -> bool:
        state = control(fresh_server.http_url, {"stats": True})
        now = scrape(fresh_server.metrics_url)
        counted = sum(v for k, v in now.items() if k.startswith("pocket_requests_total"))
        counted_tokens = now['pocket_tokens_total{type="generated"}']
        return (
            at_baseline(state)
            and now["pocket_requests_running"] == now["pocket_kv_blocks" + '{state="used"}'] == 0
            and counted == sum(state["requests"].values())
            and counted_tokens == state["generated_tokens"]
        )

    wait_for(settled, 60, "an idle server")
    before = scrape(fresh_server.metrics_url)
    draw = random.Random(count)
    kinds = [*KINDS, *draw.choices(KINDS, WEIGHTS, k=count - len(KINDS))]
    client = Client(fresh_server)
    with ThreadPoolExecutor(16) as pool:
        entries = list(
            pool.map(
                lambda job: client.run(f"ledger-{count}-{job[0]}", job[1], job[0]),
                enumerate(kinds),
            )
        )
    wait_for(settled, 60, "an idle server")
    after = scrape(fresh_server.metrics_url)
    grown = {key: round(after[key] - before[key], 6) for key in after if key in before}
    log = logged_requests(fresh_server)
    admitted = [e for e in entries if not e.outcome.startswith("refused")]
    lines = {e.request_id: log[e.request_id] for e in admitted}

    outcomes = Counter(e.outcome for e in entries)
    assert sum(outcomes.values()) == count
    for reason in ("stop", "length", "cancelled", "error"):
        assert grown[f'pocket_requests_total{{reason="{reason}"}}'] == outcomes[reason], reason
    for reason in ("invalid", "unsupported", "overloaded", "unavailable", "internal"):
        counted = grown[f'pocket_requests_refused_total{{reason="{reason}"}}']
        assert counted == outcomes[f"refused-{reason}"], reason
    by_kind = Counter(e.kind for e in entries)
    assert grown['pocket_requests_cancelled_total{reason="asked"}'] == by_kind["asked"]
    assert grown['pocket_requests_cancelled_total{reason="disconnected"}'] == by_kind["gone"]
    assert grown['pocket_requests_failed_total{reason="deadline"}'] == by_kind["deadline"]

    # Each request's log line says what its client saw, so its tokens can be summed from there.
    for entry in admitted:
        line = lines[entry.request_id]
        assert line["reason"] == entry.outcome
        assert int(line["prompt_tokens"]) == entry.prompt_tokens
        if entry.output_tokens is not None:
            assert int(line["completion_tokens"]) == entry.output_tokens
    output = [int(line["completion_tokens"]) for line in lines.values()]
    prompts = [
        int(line["prompt_tokens"]) for line in lines.values() if line["completion_tokens"] != "0"
    ]
    cached = [
        int(line["cached_tokens"]) for line in lines.values() if line["completion_tokens"] != "0"
    ]
    assert grown['pocket_tokens_total{type="generated"}'] == sum(output)
    assert grown['pocket_tokens_total{type="prompt"}'] == sum(prompts)
    assert grown['pocket_tokens_total{type="cached"}'] == sum(cached)

    completed = [e for e in entries if e.outcome in ("stop", "length")]
    long = [e for e in completed if e.output_tokens is not None and e.output_tokens > 1]
    for name in ("ttft", "request_duration", "request_queue_time", "request_prefill_time",
                 "request_decode_time"):  # fmt: skip
        assert grown[f"pocket_{name}_seconds_count"] == len(completed), name
    assert grown["pocket_request_time_per_output_token_seconds_count"] == len(long)
    assert grown["pocket_request_prompt_tokens_sum"] == sum(e.prompt_tokens for e in completed)
    deliveries = sum(tokens - 1 for tokens in output if tokens)
    assert grown["pocket_inter_token_latency_seconds_count"] == deliveries
    assert grown['pocket_inter_token_latency_seconds_bucket{le="+Inf"}'] == deliveries
    steps = grown['pocket_steps_total{result="ok"}']
    assert grown["pocket_batch_size_count"] == grown["pocket_step_seconds_count"] == steps
