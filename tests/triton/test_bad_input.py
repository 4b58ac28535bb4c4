"""Bad input of every kind: a clear error, and the server goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np
import pytest
from triton_clients import (
    GrpcStream,
    at_baseline,
    control,
    generate,
    generate_stream,
    grpc,
    grpc_stream,
    infer_input,
    post,
    wait_for,
)

from pocket_backend.triton.launcher import TritonServer

TEXT = {"text_input": "x", "max_tokens": 2}
CONTEXT = 8192

# What is sent over gRPC -> what the error must say.
TENSORS: list[tuple[str, dict[str, object], str]] = [
    ("nothing", {}, "text_input: got none; send exactly one"),
    ("empty prompt", {"text_input": ""}, "text_input: must not be empty"),
    ("two prompts", {**TEXT, "messages": "[]"}, "got text_input and messages"),
    ("beyond the context", {"text_input": "word " * (CONTEXT + 8)}, f"context holds {CONTEXT}"),
    ("max_tokens 0", {**TEXT, "max_tokens": 0}, "max_tokens: got 0"),
    ("max_tokens -1", {**TEXT, "max_tokens": -1}, "max_tokens: got -1"),
    ("NaN", {**TEXT, "temperature": math.nan}, "temperature: got nan; must be a finite number"),
    ("infinity", {**TEXT, "temperature": math.inf}, "temperature: got inf"),
    ("negative", {**TEXT, "temperature": -1.0}, "temperature: got -1.0"),
    ("top_p 0", {**TEXT, "top_p": 0.0}, "top_p: got 0.0"),
    ("wrong dtype", {**TEXT, "temperature": np.array([0.5])}, "data-type is 'FP64'"),
    ("wrong shape", {**TEXT, "max_tokens": [1, 2]}, "max_tokens"),
    ("empty tensor", {**TEXT, "max_tokens": np.array([], dtype=np.int32)}, "max_tokens"),
    ("unknown tensor", {**TEXT, "temprature": 0.5}, "temprature"),
    ("not JSON", {"messages": "[{"}, "messages: not valid JSON"),
    ("not messages", {"messages": '{"role": "user"}'}, "messages: must be a JSON list of objects"),
    ("bad role", {"messages": '[{"role": "wizard", "content": ""}]'}, "messages[0].role"),
    ("deep JSON", {"messages": "[" * 100_000}, "messages: not valid JSON"),
    ("bytes", {"text_input": b"caf\xe9 \xff"}, "text_input: not UTF-8 text (byte 0xe9"),
    ("binary stop", {**TEXT, "stop": [b"\xff"]}, "stop: not UTF-8 text"),
    ("many stops", {**TEXT, "stop": ["x"] * 500_000}, "stop: 500000 items; at most 16"),
    ("foreign id", {"input_ids": [10**9]}, "input_ids: got 1000000000"),
    ("negative id", {"input_ids": [-1]}, "input_ids: got -1"),
    ("foreign stop id", {**TEXT, "stop_token_ids": [10**9]}, "stop_token_ids: got 1000000000"),
    ("V2: n", {**TEXT, "num_return_sequences": 5_000_000}, "num_return_sequences: got 5000000"),
    ("V4: bad words", {**TEXT, "bad_words": ["x"] * 50_000}, "bad_words: 50000 items; at most 32"),
    ("beams", {**TEXT, "beam_width": 4}, "unsupported: beam_width"),
]


@pytest.fixture(autouse=True)
def healthy_afterwards(server: TritonServer) -> object:
    """After every test the same server answers, and nothing is left in it."""
    yield
    assert generate(
        server.http_url, {"text_input": "The capital of France is", "max_tokens": 1}
    ).text
    wait_for(lambda: at_baseline(control(server.http_url, {"stats": True})), what="baseline")


@pytest.mark.parametrize(
    ("fields", "message"), [case[1:] for case in TENSORS], ids=[case[0] for case in TENSORS]
)
def test_tensors(server: TritonServer, fields: dict[str, object], message: str) -> None:
    reply = grpc_stream(server.grpc_address, fields)
    assert reply.error is not None
    assert message in reply.error
    assert len(reply.error) < 600
    assert reply.responses == 0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temprature": 0.5}, "temprature: unknown field"),
        ({"temperature": "hot"}, "temperature: got 'hot'"),
        ({"max_tokens": "many"}, "max_tokens: got 'many'"),
        ({"guided_json": "{}"}, "unsupported: guided_json"),
        ({"logprobs": 100_000}, "logprobs: got 100000; must be an integer from 0 to 20"),  # V2
        ({"prompt_logprobs": 100_000}, "prompt_logprobs: got 100000"),
        ({"sampling_parameters": "{"}, "sampling_parameters: not valid JSON"),
        ({"sampling_parameters": '{"top_p": 2}'}, "top_p: got 2"),
    ],
)
def test_request_parameters(
    server: TritonServer, parameters: dict[str, object], message: str
) -> None:
    reply = grpc_stream(server.grpc_address, {"text_input": "x"}, parameters=parameters)
    assert reply.error is not None
    assert message in reply.error


@pytest.mark.parametrize("name", ["guided_json", "guided_decoding", "response_format"])
@pytest.mark.parametrize("value", ["(", '{"type": "nonsense"}', '{"$ref": "#/missing"}', "{}"])
def test_v5_v6_no_constraint_is_dropped_or_reaches_the_engine(
    server: TritonServer, name: str, value: str
) -> None:
    """V5, V6: there is no structured output, so a valid one is refused like an invalid one."""
    for body in (
        {**TEXT, name: value},
        {**TEXT, "sampling_parameters": json.dumps({name: value})},
        {**TEXT, "sampling_parameters": json.dumps({name: {"json_schema": {"strict": True}}})},
    ):
        for send in (generate, generate_stream):
            reply = send(server.http_url, body)
            assert f"unsupported: {name}" in str(reply.error)
            assert reply.responses == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 500),  # Triton's own parser answers these three
        (b"\x00\xff", 500),
        (b'{"text_input":', 500),
        (b"[]", None),
        ({}, 400),
        ({"text_input": ""}, 400),
        ({"text_input": "x", "max_tokens": 0}, 400),
        ({"text_input": "x", "temprature": 1}, 400),
        ({"messages": "nonsense"}, 400),
        ({"text_input": "x", "n": 0}, 400),
    ],
)
def test_http_bodies(
    server: TritonServer, body: Mapping[str, object] | bytes, status: int | None
) -> None:
    for endpoint in ("generate", "generate_stream"):
        code, data = post(f"{server.http_url}/v2/models/pocketllm/{endpoint}", body)
        assert 400 <= code < 600
        assert status is None or code == status
        text = data.decode().removeprefix("data: ")
        assert json.loads(text)["error"]


def test_t16_errors_end_the_stream(server: TritonServer) -> None:
    """T16: an error is the last event, then the connection closes."""
    reply = generate_stream(server.http_url, {"text_input": "x", "max_tokens": 0})
    assert reply.error is not None
    assert reply.responses == 0


def test_bad_and_good_requests_in_one_gRPC_batch_do_not_touch_each_other(  # noqa: N802
    server: TritonServer,
) -> None:
    expected = generate(server.http_url, {"text_input": "One, two,", "max_tokens": 6}).text
    fields = [{"text_input": "One, two,", "max_tokens": 6}, {"text_input": "x", "max_tokens": 0}]
    streams = [
        GrpcStream(server.grpc_address, {"stream": True, **fields[i % 2]}) for i in range(12)
    ]
    for i, stream in enumerate(streams):
        with stream:
            if i % 2:
                with pytest.raises(grpc.InferenceServerException, match="max_tokens: got 0"):
                    list(stream)
            else:
                texts = [r.as_numpy("text_output")[0].decode() for r in stream]
                assert "".join(texts) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": True}, "input_ids: missing"),
        ({"input_ids": [1], "sampling_parameters": "[]"}, "sampling_parameters: got"),
        ({"input_ids": [10**9]}, "prompt"),
        ({"input_ids": np.array([], dtype=np.int32)}, "prompt"),
        ({"input_ids": [1] * (CONTEXT + 1)}, "prompt: got 8193 tokens"),
        ({"control": "nonsense"}, "control: got 'nonsense'"),
        ({"control": b"\xff"}, "control: not UTF-8"),
    ],
)
def test_the_generator_is_public_too(
    server: TritonServer, fields: dict[str, object], message: str
) -> None:
    with (
        GrpcStream(server.grpc_address, fields, model="generator") as stream,
        pytest.raises(grpc.InferenceServerException, match=message.replace("(", r"\(")),
    ):
        list(stream)


@pytest.mark.parametrize(
    ("text_range", "message"),
    [([5, 2], "text_range"), ([-1, 2], "text_range"), ([0, 10**6], None)],
)
def test_the_detokenizer_is_public_too(
    server: TritonServer, text_range: list[int], message: str | None
) -> None:
    inputs = [
        infer_input("context_ids", [1]),
        infer_input("token_ids", [2, -5, 10**9]),
        infer_input("text_range", text_range),
    ]
    with grpc.InferenceServerClient(server.grpc_address) as client:
        if message is None:
            client.infer("detokenizer", inputs)
        else:
            with pytest.raises(grpc.InferenceServerException, match=message):
                client.infer("detokenizer", inputs)


def test_t12_unary_infer_is_a_clear_error(server: TritonServer) -> None:
    """T12: a decoupled model has no unary form."""
    with (
        grpc.InferenceServerClient(server.grpc_address) as client,
        pytest.raises(grpc.InferenceServerException, match="decoupled"),
    ):
        client.infer("pocketllm", [infer_input("text_input", "x")])


def test_admin_interfaces_need_the_key(server: TritonServer) -> None:
    base = server.http_url
    for path in ("repository/models/generator/unload", "systemsharedmemory/region/x/register"):
        status, _ = post(f"{base}/v2/{path}", b"{}")
        assert status == 403
