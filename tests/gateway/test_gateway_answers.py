"""What the gateway answers when all goes well, as raw HTTP."""

from __future__ import annotations

import json

import pytest
from fake_upstream import WORDS, FakeUpstream, failing, words
from gateway_server import RunningGateway, call, eventually

from pocket_client.gateway.schema import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    ChatRequest,
    CompletionRequest,
)

CHAT = {"model": "pocketllm", "messages": [{"role": "user", "content": "two words"}]}
TEXT = {"model": "pocketllm", "prompt": "two words", "max_tokens": 100}
FULL = "".join(WORDS)
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


def chat_text(events: list, index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    )


def test_chat(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    reply = call(gateway, "POST", CHAT_PATH, CHAT)
    assert reply.status == 200
    body = reply.json
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    prompt_tokens = len(json.dumps(CHAT["messages"]).split())
    assert body == {
        "object": "chat.completion",
        "model": "pocketllm",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": FULL, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 5,
            "total_tokens": prompt_tokens + 5,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2},
        },
    }
    (received,) = upstream.received
    assert json.loads(received.inputs["messages"]) == CHAT["messages"]
    timeout = received.parameters.pop("timeout_ms")
    assert 590_000 < timeout <= 600_000
    assert received.parameters == {"temperature": 1.0, "stream": False}  # OpenAI's default


def test_chat_stream(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    reply = call(gateway, "POST", CHAT_PATH, {**CHAT, "stream": True})
    events = reply.events
    assert reply.headers["x-accel-buffering"] == "no"
    assert events.pop() == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[1:-1]] == [{"content": word} for word in WORDS]
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["stop"]
    assert upstream.received[0].stream


def test_text_and_its_stream(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    body = call(gateway, "POST", TEXT_PATH, TEXT).json
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (FULL, "stop")
    events = call(gateway, "POST", TEXT_PATH, {**TEXT, "stream": True}).events
    assert events.pop() == "[DONE]"
    assert {event["object"] for event in events} == {"text_completion"}
    assert [event["choices"][0]["text"] for event in events] == list(WORDS)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["stop"]
    assert upstream.received[0].inputs == {"text_input": "two words"}


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"stream_options": None}, None),
        ({"stream_options": {}}, None),
        ({"stream_options": {"include_usage": False}}, None),
        ({"stream_options": {"include_usage": None}}, None),
        ({"stream_options": {"include_usage": True}}, 5),
    ],
)
def test_v12_usage_only_when_asked_for_and_only_at_the_end(
    gateway: RunningGateway, path: str, options: dict[str, object], expected: int | None
) -> None:
    base = CHAT if path == CHAT_PATH else TEXT
    events = call(gateway, "POST", path, {**base, "stream": True, **options}).events
    assert events.pop() == "[DONE]"
    if expected is None:
        assert all("usage" not in event for event in events)
        assert all(event["choices"] for event in events)
        return
    last = events.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == expected
    assert all(event["usage"] is None and event["choices"] for event in events)


def test_v12_an_aborted_stream_has_no_usage(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    upstream.script = failing(("chunk", ("a", (1,), "")), ("error", "computing failed: boom"))
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    events = call(gateway, "POST", CHAT_PATH, body).events
    assert all(event.get("usage") is None for event in events)
    assert events[-1]["error"]["message"] == "computing failed: boom"


def test_finish_reasons(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    for limit in ("max_tokens", "max_completion_tokens"):
        for stream in (False, True):
            body = {**CHAT, limit: 2, "stream": stream}
            reply = call(gateway, "POST", CHAT_PATH, body)
            choice = (reply.events[-2] if stream else reply.json)["choices"][0]
            assert choice["finish_reason"] == "length"
    upstream.script = failing(("chunk", ("a", (1,), "stop", "END")))
    for stream in (False, True):
        reply = call(gateway, "POST", TEXT_PATH, {**TEXT, "stop": "END", "stream": stream})
        choice = (reply.events[-2] if stream else reply.json)["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")


def test_parameters_reach_the_wire(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    sent = {
        "max_tokens": 7,
        "temperature": 0.25,
        "top_p": 0.5,
        "seed": -(2**63),
        "stop": ["a", "b"],
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"5": -100},
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    carried = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    for path, base in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        reply = call(gateway, "POST", path, {**base, **sent, **carried})
        assert reply.status == 200, reply.body
        received = upstream.received[-1].parameters
        del received["timeout_ms"], received["stream"]
        assert received == sent


def test_defaults_and_edges(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    body = {"model": "pocketllm", "prompt": "x"}
    assert call(gateway, "POST", TEXT_PATH, body).status == 200
    assert upstream.received[-1].parameters["max_tokens"] == 16
    call(gateway, "POST", TEXT_PATH, {**body, "top_p": 0})
    assert upstream.received[-1].parameters["temperature"] == 0
    assert "top_p" not in upstream.received[-1].parameters
    call(gateway, "POST", TEXT_PATH, {**body, "stop": "x", "temperature": 0})
    assert upstream.received[-1].parameters["stop"] == ["x"]
    call(
        gateway,
        "POST",
        CHAT_PATH,
        {**CHAT, "continue_final_message": True, "chat_template_kwargs": {"a": 1}},
    )
    assert upstream.received[-1].inputs["continue_final_message"] is True
    assert upstream.received[-1].inputs["chat_template_kwargs"] == '{"a": 1}'


def test_v11_null_is_absent(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    optional = {*ChatRequest.model_fields, *CHAT_REFUSED} - CHAT.keys()
    reply = call(gateway, "POST", CHAT_PATH, {**CHAT, **dict.fromkeys(optional)})
    assert reply.status == 200, reply.body
    assert upstream.received[0].parameters.keys() == {"temperature", "stream", "timeout_ms"}
    optional = {*CompletionRequest.model_fields, *COMPLETION_REFUSED} - {"model", "prompt"}
    body = {"model": "pocketllm", "prompt": "x", **dict.fromkeys(optional)}
    assert call(gateway, "POST", TEXT_PATH, body).status == 200


def test_values_that_ask_for_nothing_are_accepted(gateway: RunningGateway) -> None:
    body = {
        **CHAT,
        "n": 1,
        "logprobs": False,
        "bad_words": [],
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "metadata": {},
        "modalities": ["text"],
        "service_tier": "auto",
        "logit_bias": {},
        "stop": [],
    }
    assert call(gateway, "POST", CHAT_PATH, body).status == 200
    assert call(gateway, "POST", TEXT_PATH, {**TEXT, "best_of": 1, "suffix": ""}).status == 200


# --- several choices ----------------------------------------------------------------------------


def test_n_gives_distinct_choices(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    body = {**CHAT, "n": 3, "seed": 2**64 - 2}
    reply = call(gateway, "POST", CHAT_PATH, body).json
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in reply["choices"]] == [FULL] * 3
    (received,) = upstream.received  # the prompt is computed once
    assert (received.parameters["n"], received.parameters["seed"]) == (3, 2**64 - 2)
    usage = reply["usage"]
    assert usage["completion_tokens"] == 15
    assert usage["prompt_tokens"] == len(json.dumps(CHAT["messages"]).split())  # once
    events = call(gateway, "POST", CHAT_PATH, {**body, "stream": True}).events
    assert [chat_text(events, index) for index in range(3)] == [FULL] * 3
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_lists_of_prompts(gateway: RunningGateway, upstream: FakeUpstream, stream: bool) -> None:
    upstream.script = lambda received: iter(
        [("chunk", (received.inputs["text_input"].upper(), (1,), "stop"))]
    )
    body = {**TEXT, "prompt": ["a b", "c"], "n": 2, "echo": True, "stream": stream}
    reply = call(gateway, "POST", TEXT_PATH, body)
    texts: dict[int, str] = {}
    for part in reply.events[:-1] if stream else [reply.json]:
        for choice in part["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "a bA B", 1: "a bA B", 2: "cC", 3: "cC"}
    if not stream:
        assert reply.json["usage"]["prompt_tokens"] == 3
        assert reply.json["usage"]["completion_tokens"] == 4


def test_prompts_of_token_ids(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    assert call(gateway, "POST", TEXT_PATH, {**TEXT, "prompt": [1, 2, 3]}).status == 200
    assert upstream.received[-1].inputs == {"input_ids": [1, 2, 3]}
    reply = call(gateway, "POST", TEXT_PATH, {**TEXT, "prompt": [[1], [2, 3]]}).json
    assert len(reply["choices"]) == 2
    ids = sorted(received.inputs["input_ids"] for received in upstream.received[-2:])
    assert ids == [[1], [2, 3]]


def test_one_failing_prompt_fails_the_request(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    def script(received: object) -> object:
        if received.id.endswith("-1"):  # type: ignore[attr-defined]
            upstream.wait_for_requests(3)
            return iter([("error", "computing failed: boom")])
        received.wait()  # type: ignore[attr-defined]
        return words(received)  # type: ignore[arg-type]

    upstream.script = script  # type: ignore[assignment]
    reply = call(gateway, "POST", TEXT_PATH, {**TEXT, "prompt": ["a", "b", "c"]})
    assert reply.status == 500
    assert reply.error["message"] == "computing failed: boom"
    others = {received.id for received in upstream.received if not received.id.endswith("-1")}
    assert len(others) == 2
    upstream.wait_for(lambda: others <= set(upstream.cancelled_ids), "the others are cancelled")


# --- other endpoints ----------------------------------------------------------------------------


def test_models(gateway: RunningGateway) -> None:
    (model,) = call(gateway, "GET", "/v1/models").json["data"]
    assert model.pop("created") > 1_600_000_000
    assert model == {"id": "pocketllm", "object": "model", "owned_by": "pocketllm"}
    assert call(gateway, "GET", "/v1/models/pocketllm").json["id"] == "pocketllm"
    assert call(gateway, "GET", "/v1/models/other").status == 404


def test_tokenize_and_detokenize(gateway: RunningGateway) -> None:
    reply = call(gateway, "POST", "/tokenize", {"prompt": "abc"})
    assert reply.json == {"count": 3, "tokens": [97, 98, 99]}
    chat = {"messages": [{"role": "user"}], "add_generation_prompt": False, "model": "pocketllm"}
    assert call(gateway, "POST", "/tokenize", chat).json["count"] > 3
    assert call(gateway, "POST", "/detokenize", {"tokens": [104, 105]}).json == {"prompt": "hi"}
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{}]}),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
        ("/detokenize", {"tokens": []}),
        ("/detokenize", {"tokens": [2**31]}),
    ):
        reply = call(gateway, "POST", path, body)
        assert reply.status == 400, (path, body)
        assert reply.error["param"] in {*body, "prompt", "tokens[0]"}


def test_health_and_metrics(gateway: RunningGateway) -> None:
    assert call(gateway, "GET", "/health").json == {"status": "ok"}
    before = gateway.metric("pocketllm_gateway_completion_tokens_total")
    labels = {"endpoint": CHAT_PATH, "status": "200"}
    requests = gateway.metric("pocketllm_gateway_requests_total", **labels)
    call(gateway, "POST", CHAT_PATH, CHAT)
    call(gateway, "POST", CHAT_PATH, {**CHAT, "stream": True})
    reply = call(gateway, "GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert gateway.metric("pocketllm_gateway_completion_tokens_total") == before + 10
    assert b"pocketllm_gateway_time_to_first_token_seconds_bucket" in reply.body
    assert gateway.metric("pocketllm_gateway_generations_in_flight") == 0
    total = "pocketllm_gateway_requests_total"  # counted when the connection is done with
    eventually(lambda: gateway.metric(total, **labels) == requests + 2, "both are counted")


def test_request_ids_and_trace_context(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    headers = {"X-Request-Id": "mine.1", "traceparent": parent, "tracestate": "v=1"}
    reply = call(gateway, "POST", CHAT_PATH, CHAT, headers)
    assert reply.headers["x-request-id"] == "mine.1"
    metadata = upstream.received[-1].metadata
    assert (metadata["traceparent"], metadata["tracestate"]) == (parent, "v=1")
    headers = {"X-Request-Id": "two words", "traceparent": "nonsense"}
    reply = call(gateway, "POST", CHAT_PATH, CHAT, headers)
    assert reply.headers["x-request-id"].startswith("req-")
    assert "traceparent" not in upstream.received[-1].metadata
    assert call(gateway, "GET", "/nope").headers["x-request-id"]


# --- log probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_chat_log_probabilities(
    gateway: RunningGateway, upstream: FakeUpstream, stream: bool
) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2, "stream": stream}
    reply = call(gateway, "POST", CHAT_PATH, body)
    parts = reply.events[:-1] if stream else [reply.json]
    for index in range(2):
        entries = [
            entry
            for part in parts
            for choice in part["choices"]
            if choice["index"] == index and choice["logprobs"] is not None
            for entry in choice["logprobs"]["content"]
        ]
        assert [entry["token"] for entry in entries] == list(WORDS)
        assert [entry["logprob"] for entry in entries] == [-1.0, -2.0, -3.0, -4.0, -5.0]
        assert entries[3]["bytes"] == list(" wörld".encode())
        assert entries[0]["top_logprobs"] == [
            {"token": "<1>", "logprob": 0.0, "bytes": list(b"<1>")},
            {"token": "<2>", "logprob": 0.0, "bytes": list(b"<2>")},
        ]
        assert set(entries[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    if stream:
        for part in parts:
            (choice,) = part["choices"]
            spoken = bool(choice["delta"].get("content"))
            assert (choice["logprobs"] is not None) == spoken
    assert upstream.received[0].parameters["logprobs"] == 2


def test_log_probabilities_without_alternatives(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    reply = call(gateway, "POST", CHAT_PATH, {**CHAT, "logprobs": True}).json
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[]] * len(WORDS)
    text = call(gateway, "POST", TEXT_PATH, {**TEXT, "logprobs": 0}).json
    logprobs = text["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list(WORDS)
    assert logprobs["top_logprobs"] is None
    assert [received.parameters["logprobs"] for received in upstream.received] == [0, 0]


def test_a_token_without_text_keeps_its_entry(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    upstream.script = failing(("chunk", ("a", (1,), "")), ("chunk", ("", (2,), "stop")))
    events = call(gateway, "POST", CHAT_PATH, {**CHAT, "logprobs": True, "stream": True}).events[
        :-1
    ]
    entries = [
        entry["logprob"]
        for event in events
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert entries == [-1.0, -2.0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_text_log_probabilities(
    gateway: RunningGateway, upstream: FakeUpstream, stream: bool, echo: bool
) -> None:
    prompt = "the word word"  # as this upstream's prompt_logprobs say
    body = {**TEXT, "prompt": prompt, "logprobs": 1, "stream": stream, "echo": echo}
    reply = call(gateway, "POST", TEXT_PATH, body)
    merged: dict[str, list] = {}
    text = ""
    for part in reply.events[:-1] if stream else [reply.json]:
        (choice,) = part["choices"]
        text += choice["text"]
        for name, values in choice["logprobs"].items():
            merged.setdefault(name, []).extend(values)
    pieces = ["the", " word", " word", *WORDS] if echo else list(WORDS)
    values = [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert text == "".join(pieces)
    assert merged["tokens"] == pieces
    assert merged["token_logprobs"] == ([None, -1.0, -2.0, *values] if echo else values)
    assert merged["text_offset"] == [len("".join(pieces[:i])) for i in range(len(pieces))]
    assert merged["top_logprobs"][-1] == {"<1>": 0.0, "!": -5.0}
    assert merged["top_logprobs"][0] == (None if echo else {"<1>": 0.0, "Hello": -1.0})
    assert upstream.received[0].parameters.get("prompt_logprobs") == (1 if echo else None)
