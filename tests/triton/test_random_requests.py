"""Random requests, valid and not, from many clients at once: every one gets exactly one outcome."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from triton_clients import (
    GrpcStream,
    at_baseline,
    control,
    generate,
    generate_stream,
    grpc_stream,
    wait_for,
)

from pocket_backend.triton.launcher import TritonServer

PROMPTS: list[dict[str, object]] = [
    {"text_input": "abc"},
    {"text_input": "\u20ac \U0001f600 \0 x" * 20},
    {"text_input": "x" * 5000},
    {"text_input": ""},
    {"input_ids": [1, 2, 3]},
    {"input_ids": [10**6]},
    {"messages": json.dumps([{"role": "user", "content": "hi"}])},
    {"messages": "[{"},
    {"text_input": "abc", "messages": "[]"},
    {},
]
FIELDS: dict[str, list[object]] = {
    "max_tokens": [1, 5, 30, 0, -1],
    "temperature": [0.0, 0.7, 1.5, -1.0, math.nan],
    "top_k": [0, 5, -1, -2],
    "top_p": [1.0, 0.5, 0.0],
    "seed": [1, 2**63],
    "stop": [["a"], ["\u20ac", "bc"], [""], ["x"] * 40],
    "stop_token_ids": [[7], [10**6]],
    "ignore_eos": [True, False],
    "n": [1, 3, 0],
    "return_logprobs": [True, False],
    "return_timings": [True],
    "timeout_ms": [1, 20, 60_000],
    "sampling_parameters": ['{"top_p": 0.9}', "{", '{"nonsense": 1}'],
    "min_tokens": [0, 3, 100],
    "priority": [-5, 5],
}


def random_request(choose: random.Random) -> dict[str, object]:
    body = dict(choose.choice(PROMPTS))
    body["max_tokens"] = choose.choice([1, 5, 30])
    for name in choose.sample(sorted(FIELDS), choose.randint(0, 3)):
        body[name] = choose.choice(FIELDS[name])
    return body


def outcome(server: TritonServer, seed: int) -> str:
    """Send request number ``seed`` one way or another, and say how it ended."""
    choose = random.Random(seed)
    body = random_request(choose)
    way = choose.choice(["generate", "generate_stream", "grpc", "leave"])
    if way == "leave":
        stream = GrpcStream(server.grpc_address, {"stream": True, **body})
        stream.close(cancel=True)
        return "left"
    if way == "grpc":
        reply = grpc_stream(server.grpc_address, body)
    else:
        as_json = {
            name: value
            for name, value in body.items()
            if not (isinstance(value, float) and math.isnan(value))
        }
        reply = (generate if way == "generate" else generate_stream)(server.http_url, as_json)
    if reply.error is not None:
        assert 0 < len(reply.error) < 600
        return "error"
    assert reply.finish_reason in ("stop", "length")
    assert reply.num_output_tokens == len(reply.token_ids) > 0
    assert way != "generate" or reply.responses == 1
    return "answered"


def run_many(server: TritonServer, count: int, seed: int) -> Counter[str]:
    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(lambda i: outcome(server, seed + i), range(count)))
    wait_for(lambda: at_baseline(control(server.http_url, {"stats": True})), what="baseline")
    return Counter(outcomes)


def test_every_request_has_one_outcome(fake_server: TritonServer) -> None:
    ledger = run_many(fake_server, 300, seed=0)
    assert ledger.total() == 300
    assert all(ledger[name] > 20 for name in ("answered", "error", "left")), ledger


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_t2_ten_thousand_requests(fake_server: TritonServer) -> None:
    """T2: no deadlock after minutes of load from many clients, and no response is lost."""
    ledger = run_many(fake_server, 10_000, seed=10_000)
    assert ledger.total() == 10_000
    assert all(ledger[name] > 500 for name in ("answered", "error", "left")), ledger


def test_same_seeded_request_gives_the_same_text_amid_noise(fake_server: TritonServer) -> None:
    """S12 through the server: neighbours do not change a seeded request."""
    body = {"text_input": "steady", "max_tokens": 40, "temperature": 1.0, "seed": 99}
    expected = generate(fake_server.http_url, body)
    with ThreadPoolExecutor(8) as pool:
        noise = [pool.submit(outcome, fake_server, 500 + i) for i in range(40)]
        steady = [pool.submit(grpc_stream, fake_server.grpc_address, body) for _ in range(8)]
        assert {tuple(s.result().token_ids) for s in steady} == {tuple(expected.token_ids)}
        for future in noise:
            future.result()


def test_wrong_tensor_types_at_random(fake_server: TritonServer) -> None:
    """Every field with every dtype that it does not have: refused, by Triton or by us."""
    choose = random.Random(3)
    dtypes = [np.float64, np.int64, np.uint8, np.float16, np.int16]
    for name in ("max_tokens", "temperature", "stream", "stop", "input_ids", "seed", "text_input"):
        value = np.ones(1, dtype=choose.choice(dtypes))
        reply = grpc_stream(fake_server.grpc_address, {"text_input": "x", name: value})
        assert reply.error is not None
        assert name in reply.error
