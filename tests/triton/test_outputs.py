"""Several outputs, log probabilities, bad words and timings through the whole server.

What the engine gives in this process is what every path has to bring, value for value.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from triton_clients import (
    GrpcStream,
    at_baseline,
    control,
    generate,
    infer_input,
    post,
    wait_for,
)

from pocket_backend import LLM, SamplingParams, UnifiedEngine
from pocket_backend.api import GenerationResult, TokenLogprob
from pocket_backend.triton.launcher import TritonServer

PROMPT = "The capital of France is"
SAMPLED = {"max_tokens": 12, "temperature": 1.0, "seed": 11}


@pytest.fixture(autouse=True)
def baseline_afterwards(server: TritonServer) -> object:
    yield
    wait_for(lambda: at_baseline(control(server.http_url, {"stats": True})), 20, "baseline")


def in_process(engine: UnifiedEngine, **sampling: object) -> list[GenerationResult]:
    return LLM(engine=engine).generate(PROMPT, SamplingParams(**sampling))  # type: ignore[arg-type]


def whole(server: TritonServer, **fields: object) -> dict[str, Any]:
    """The answer of `generate`."""
    body = {"text_input": PROMPT, **fields}
    status, data = post(f"{server.http_url}/v2/models/pocketllm/generate", body)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


def events(server: TritonServer, **fields: object) -> list[dict[str, Any]]:
    """The answers of `generate_stream`."""
    body = {"text_input": PROMPT, "stream": True, **fields}
    _, data = post(f"{server.http_url}/v2/models/pocketllm/generate_stream", body)
    return [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: ")]


def plain(items: list[Mapping[str, Any]]) -> list[tuple[int, float, dict[int, float]]]:
    """(token, its value, alternatives) of each entry of a `logprobs` output."""
    found = []
    for entry in items:
        token = int(next(iter(entry)))
        top = {int(name): item["logprob"] for name, item in entry.items() if item["rank"]}
        found.append((token, entry[str(token)]["logprob"], top))
    return found


def expected(items: tuple[TokenLogprob | None, ...]) -> list[tuple[int, float, dict[int, float]]]:
    return [(item.token_id, item.logprob, dict(item.top)) for item in items if item is not None]


def test_log_probabilities_on_every_path(server: TritonServer, engine: UnifiedEngine) -> None:
    [result] = in_process(engine, logprobs=3, **SAMPLED)
    once = whole(server, logprobs=3, **SAMPLED)
    streamed = events(server, sampling_parameters=json.dumps({"logprobs": 3, **SAMPLED}))
    assert plain(json.loads(once["logprobs"])) == expected(result.logprobs)
    pieces = [entry for event in streamed for entry in json.loads(event["logprobs"])]
    assert plain(pieces) == expected(result.logprobs)
    for last in (once, streamed[-1]):
        assert last["cumulative_logprob"] == pytest.approx(result.cumulative_logprob, rel=1e-5)
    values = [entry[str(t)] for t, entry in zip(result.token_ids, pieces, strict=True)]
    assert b"".join(bytes(v["bytes"]) for v in values).decode().startswith(result.text)
    with GrpcStream(
        server.grpc_address,
        {"text_input": PROMPT, "stream": True, "return_log_probs": True, "max_tokens": 4},
    ) as stream:
        received = 0
        for response in stream:  # on a busy machine several tokens come in one
            entries = json.loads(response.as_numpy("logprobs")[0])
            received += len(entries)
            assert all(len(entry) == 1 for entry in entries)
            assert response.as_numpy("cumulative_logprob").dtype == np.float32
            assert response.as_numpy("num_output_tokens")[0] == received
        assert received == 4


def test_log_probabilities_of_the_prompt(server: TritonServer, engine: UnifiedEngine) -> None:
    """Whatever the prefix cache holds, and by chunks of a long prompt."""
    [result] = in_process(engine, prompt_logprobs=2, max_tokens=2)
    found = []
    for _ in range(2):
        answer = whole(server, prompt_logprobs=2, max_tokens=2)
        assert answer["num_cached_tokens"] == 0
        first, *rest = json.loads(answer["prompt_logprobs"])
        assert first is None
        found.append(plain(rest))
    assert found[0] == found[1] == expected(result.prompt_logprobs)
    assert len(found[0]) == answer["num_input_tokens"] - 1
    text, *later = events(server, text_input="one two " * 600, prompt_logprobs=0, max_tokens=3)
    assert len(json.loads(text["prompt_logprobs"])) == text["num_input_tokens"] > 1000
    assert all(event["prompt_logprobs"] == [] for event in later)


def test_several_outputs_on_every_path(server: TritonServer, engine: UnifiedEngine) -> None:
    results = in_process(engine, n=3, logprobs=0, **SAMPLED)
    texts = [result.text for result in results]
    assert len(set(texts)) == 3
    once = whole(server, num_return_sequences=3, logprobs=0, **SAMPLED)
    assert once["text_output"] == texts
    assert once["sequence_index"] == [0, 1, 2]
    assert once["finish_reason"] == [result.finish_reason for result in results]
    assert once["token_ids"] == [token for result in results for token in result.token_ids]
    assert once["num_output_tokens"] == [len(result.token_ids) for result in results]
    for text, result in zip(once["logprobs"], results, strict=True):
        assert plain(json.loads(text)) == expected(result.logprobs)
    joined = dict.fromkeys(range(3), "")
    for event in events(server, n=3, **SAMPLED):
        joined[event["sequence_index"]] += event["text_output"]
    assert list(joined.values()) == texts


def test_t8_closing_a_stream_of_several_outputs_frees_all_slots(server: TritonServer) -> None:
    stream = GrpcStream(
        server.grpc_address,
        {"text_input": PROMPT, "stream": True, "n": 4, "max_tokens": 3000, "ignore_eos": True},
        parameters={"logprobs": 5},
    )
    next(iter(stream))
    stream.close(cancel=True)  # T16: with log probabilities on; baseline_afterwards waits


@pytest.mark.parametrize("word", [" Paris", "Paris", "aris", "Par"])
def test_bad_words_never_appear_however_tokenized(server: TritonServer, word: str) -> None:
    assert "Paris" in whole(server, max_tokens=8)["text_output"]
    for fields in ({}, {"temperature": 1.5, "seed": 3, "top_k": 40}):
        reply = generate(
            server.http_url,
            {"text_input": PROMPT, "bad_words": [word], "max_tokens": 40, **fields},
        )
        assert reply.error is None
        assert word not in reply.text
        assert reply.num_output_tokens > 1


def test_timings_on_request(server: TritonServer) -> None:
    assert whole(server, max_tokens=2)["timings"] == []
    *before, last = events(server, max_tokens=3, return_timings=True)
    assert all(event["timings"] == [] for event in before)
    times = json.loads(last["timings"])
    assert 0 < times["ttft_seconds"] <= times["total_seconds"]
    assert set(times) >= {"queue_seconds", "prefill_seconds", "decode_seconds", "tpot_seconds"}


@pytest.mark.parametrize("name", ["cum_log_probs", "context_logits", "generation_logits"])
def test_an_output_that_does_not_exist_is_refused_by_name(server: TritonServer, name: str) -> None:
    """TensorRT-LLM's clients learn at once that a name differs here (docs/triton.md)."""
    client = grpc.InferenceServerClient(server.grpc_address)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put(error))
    try:
        client.async_stream_infer(
            "pocketllm",
            [infer_input("text_input", PROMPT)],
            outputs=[grpc.InferRequestedOutput(name)],
        )
        assert f"unexpected inference output '{name}'" in str(answers.get(timeout=60))
    finally:
        client.stop_stream()
        client.close()
