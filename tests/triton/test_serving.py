"""The same request gives the same text on every path, alone and under load."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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

from pocket_backend import SamplingParams, UnifiedEngine
from pocket_backend.text import Tokenizer, load_tokenizer
from pocket_backend.triton.launcher import ServerOptions, TritonServer, find_model_repository
from pocket_backend.triton.ports import Ports

PROMPT = "The capital of France is"
CHAT = json.dumps(
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
)


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Tokenizer:
    return load_tokenizer(model_path)


def in_process(
    engine: UnifiedEngine, ids: list[int], **sampling: object
) -> tuple[list[int], str, str]:
    tokens: list[int] = []
    text, reason = "", ""
    for event in engine.generate(ids, sampling_params=SamplingParams(**sampling)):  # type: ignore[arg-type]
        text += event["text"]  # type: ignore[operator]
        if event["type"] == "token":
            tokens.append(event["token_id"])  # type: ignore[arg-type]
        else:
            reason = str(event["finish_reason"])
    return tokens, text, reason


def test_chat_answers_paris(server: TritonServer) -> None:
    reply = generate(server.http_url, {"messages": CHAT, "max_tokens": 32})
    assert reply.text == "The capital of France is Paris."
    assert reply.finish_reason == "stop"


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 24},
        {"max_tokens": 24, "temperature": 1.0, "seed": 42, "top_k": 50, "top_p": 0.95},
        {"max_tokens": 24, "temperature": 0.7, "seed": 7, "min_p": 0.05},
        {"max_tokens": 40, "stop": ["United", "\n\nThe"]},
        {"max_tokens": 24, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 20},
        {
            "max_tokens": 24,
            "presence_penalty": 1.0,
            "bad_token_ids": [7042],
            "temperature": 0.5,
            "seed": 3,
        },
    ],
    ids=["greedy", "seeded", "min_p", "stop", "penalties", "bad ids"],
)
def test_all_paths_equal_the_engine(
    server: TritonServer, engine: UnifiedEngine, tokenizer: Tokenizer, sampling: dict[str, object]
) -> None:
    body = {"text_input": PROMPT, **sampling}
    tokens, text, reason = in_process(engine, tokenizer.encode(PROMPT), **sampling)
    assert text
    replies = {
        "generate": generate(server.http_url, {**body, "stream": False}),
        "generate_stream": generate_stream(server.http_url, body),
        "grpc": grpc_stream(server.grpc_address, body),
        "json": grpc_stream(
            server.grpc_address,
            {"text_input": PROMPT, "sampling_parameters": json.dumps(sampling)},
        ),
        "request parameters": grpc_stream(
            server.grpc_address,
            {"text_input": PROMPT},
            parameters={"sampling_parameters": json.dumps(sampling)}
            if any(isinstance(value, list) for value in sampling.values())
            else sampling,
        ),
    }
    for path, reply in replies.items():
        assert reply.error is None, (path, reply.error)
        assert reply.text == text, path
        assert reply.token_ids == tokens, path
        assert reply.finish_reason == reason, path
        assert reply.num_input_tokens == len(tokenizer.encode(PROMPT)), path
        assert reply.num_output_tokens == len(tokens), path
    assert replies["generate"].responses == 1
    # How many tokens share a chunk depends on the machine's speed (docs/triton.md).
    assert all(reply.responses > 1 for path, reply in replies.items() if path != "generate")


def test_sixteen_streams_equal_their_sequential_runs(server: TritonServer) -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    bodies = [
        {
            "text_input": f"Count with me: {' '.join(words[: 1 + i % 10])}",
            "max_tokens": 8 + 5 * i,
            **({"temperature": 0.9, "seed": i} if i % 2 else {}),
        }
        for i in range(16)
    ]
    alone = [grpc_stream(server.grpc_address, body) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda body: grpc_stream(server.grpc_address, body), bodies))
    for one, other in zip(alone, together, strict=True):
        assert one.error is other.error is None
        assert (one.text, one.token_ids, one.finish_reason) == (
            other.text,
            other.token_ids,
            other.finish_reason,
        )
    assert len({reply.num_output_tokens for reply in alone}) > 8
    wait_for(lambda: at_baseline(control(server.http_url, {"stats": True})), what="baseline")


def test_request_id_comes_back(server: TritonServer) -> None:
    with GrpcStream(
        server.grpc_address,
        {"text_input": PROMPT, "stream": True, "max_tokens": 3},
        request_id="my-request",
    ) as stream:
        assert {result.get_response().id for result in stream} == {"my-request"}


def test_ids_as_prompt_and_generator_alone(server: TritonServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    by_text = generate(server.http_url, {"text_input": PROMPT, "max_tokens": 8})
    by_ids = generate(server.http_url, {"input_ids": ids, "max_tokens": 8})
    assert by_ids.text == by_text.text
    with GrpcStream(
        server.grpc_address,
        {"input_ids": ids, "stream": True},
        model="generator",
        parameters={"max_tokens": 8},
    ) as stream:
        tokens = [token for result in stream for token in result.as_numpy("token_ids").tolist()]
    assert tokens == by_text.token_ids


def test_without_max_tokens_the_context_bounds_the_answer(fake_server: TritonServer) -> None:
    reply = generate(fake_server.http_url, {"text_input": "x" * 4000})
    assert (reply.num_output_tokens, reply.finish_reason) == (96, "length")


def test_d5_text_rule_over_broken_utf8(fake_server: TritonServer) -> None:
    """D5: random bytes, one a token; the pieces join to the decoding of all ids."""
    bodies = [{"text_input": f"prompt {i}", "max_tokens": 64} for i in range(60)]
    with ThreadPoolExecutor(20) as pool:
        streams = list(pool.map(lambda b: generate_stream(fake_server.http_url, b), bodies))
        singles = list(pool.map(lambda b: generate(fake_server.http_url, b), bodies))
    for stream, single in zip(streams, singles, strict=True):
        data = bytes(token for token in stream.token_ids if token)
        assert stream.text == single.text == data.decode("utf-8", "replace")
        assert len(stream.token_ids) == 64


def test_d6_stop_string_never_leaks(server: TritonServer) -> None:
    """D6: a stop string that spans tokens and ends inside one."""
    free = generate(server.http_url, {"text_input": PROMPT, "max_tokens": 16}).text
    stop = free[3:9]
    body = {"text_input": PROMPT, "max_tokens": 16, "stop": [stop]}
    streamed, single = generate_stream(server.http_url, body), generate(server.http_url, body)
    assert streamed.text == single.text == free[: free.index(stop)]
    assert streamed.finish_reason == single.finish_reason == "stop"
    assert streamed.stop_reason == single.stop_reason == stop
    kept = generate(server.http_url, {**body, "include_stop_str_in_output": True})
    assert kept.text == free[: free.index(stop)] + stop


def test_t12_stream_true_on_generate_is_a_clear_error(server: TritonServer) -> None:
    """T12: the wrong combination of endpoint and mode is refused, and nothing stays behind."""
    reply = generate(server.http_url, {"text_input": PROMPT, "stream": True, "max_tokens": 4})
    assert reply.error is not None
    assert "exactly 1 response" in reply.error
    wait_for(lambda: at_baseline(control(server.http_url, {"stats": True})), what="baseline")


def test_t13_slow_detokenizer_gets_larger_chunks(tmp_path: Path) -> None:
    """T13: 16 streams make 1,600 tokens a second, this detokenizer does 50 chunks a second."""
    repository = shutil.copytree(find_model_repository(), tmp_path / "models")
    with (repository / "detokenizer" / "1" / "model.py").open("a") as model:
        model.write(
            "\n    def execute(self, requests):\n        import time\n\n"
            "        time.sleep(0.02)\n        return self._model.execute(requests)\n"
        )
    options = ServerOptions(
        "fake",
        ports=Ports(0, 0, 0),
        model_repository=repository,
        environment={"POCKETLLM_FAKE_OPTIONS": '{"delay_seconds": 0.01}'},
    )
    body = {"text_input": "abc", "max_tokens": 250, "ignore_eos": True}
    with TritonServer(options) as server, ThreadPoolExecutor(16) as pool:
        expected = generate(server.http_url, body)
        streams = [pool.submit(generate_stream, server.http_url, body) for _ in range(16)]
        replies = [stream.result() for stream in streams]
    for reply in replies:
        assert (reply.error, reply.text) == (None, expected.text)
        assert reply.token_ids == expected.token_ids
        assert reply.responses > 2
    # Unbounded, 4,000 chunks would come, the last of them after 80 seconds.
    assert sum(reply.responses for reply in replies) < 2000
