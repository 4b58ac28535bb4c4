"""POST /v1/responses: what is sent upstream, objects and events, refusals; and the OpenAI SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_upstream import WORDS, FakeUpstream, failing, two_then_wait, wait_first
from gateway_server import Reply, RunningGateway, call, open_request, read_until
from openai.types.responses import Response, ResponseCompletedEvent, ResponseIncompleteEvent

TEXT = "".join(WORDS)


@pytest.fixture
def sdk(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(gateway: RunningGateway, **body: object) -> Reply:
    return call(gateway, "POST", "/v1/responses", {"model": "pocketllm", "input": "Hi", **body})


def typed_events(body: bytes) -> list[dict[str, Any]]:
    """Parsed; asserts that the event lines agree with the types."""
    found = []
    for block in body.decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found


def test_the_whole_object(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    reply = ask(gateway, instructions="Be brief.", temperature=0.5, seed=3)
    assert reply.status == 200
    body = reply.json
    Response.model_validate(body, strict=False)
    assert body["status"] == "completed"
    assert body["incomplete_details"] is None
    [message] = body["output"]
    assert message["content"] == [
        {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    ]
    assert message["id"].startswith("msg-")
    assert body["id"].startswith("resp-")
    assert body["usage"]["output_tokens"] == 5
    assert body["usage"]["input_tokens"] + 5 == body["usage"]["total_tokens"]
    [received] = upstream.received
    assert json.loads(received.inputs["messages"]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert received.parameters["temperature"] == 0.5
    assert received.parameters["seed"] == 3


def test_an_answer_can_be_sent_back(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    first = ask(gateway).json
    question = {"role": "user", "content": [{"type": "input_text", "text": "And?"}]}
    developer = {"type": "message", "role": "developer", "content": "Be kind."}
    reply = ask(gateway, input=[developer, *first["output"], question])
    assert reply.status == 200
    assert json.loads(upstream.received[-1].inputs["messages"]) == [
        {"role": "developer", "content": "Be kind."},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "And?"},
    ]


def test_a_limit_makes_it_incomplete(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    body = ask(gateway, max_output_tokens=2).json
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    assert upstream.received[0].parameters["max_tokens"] == 2


def test_events_in_order(gateway: RunningGateway) -> None:
    reply = ask(gateway, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = typed_events(reply.body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(WORDS),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event.get("delta", "") for event in events) == TEXT
    assert events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == TEXT
    assert final["usage"]["output_tokens"] == len(WORDS)
    assert {event["item_id"] for event in events if "item_id" in event} == {
        final["output"][0]["id"]
    }
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_a_stream_that_fails(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    upstream.script = failing(("chunk", ("a", (1,), "")), ("error", "computing failed: boom"))
    *_, error, failed = typed_events(ask(gateway, stream=True).body)
    assert error["type"] == "error"
    assert "boom" in error["message"]
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["sequence_number"] == error["sequence_number"] + 1


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "unsupported_parameter"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"previous_response_id": "resp-1"}, "previous_response_id", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", None),
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": 3}, "input", None),
        ({"input": ["x"]}, "input[0]", None),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", None),
        ({"input": [{"role": "user"}]}, "input[0].content", None),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
            "input[0].type",
            "unsupported_parameter",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            None,
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"temperature": 3}, "temperature", None),
        ({"model": "gpt-99"}, "model", "model_not_found"),
    ],
)
def test_refused_by_name(
    change: dict[str, object],
    param: str,
    code: str | None,
    gateway: RunningGateway,
    upstream: FakeUpstream,
) -> None:
    reply = ask(gateway, **change)
    assert reply.status == (404 if code == "model_not_found" else 400)
    assert (reply.error["param"], reply.error["code"]) == (param, code)
    assert not upstream.received


def test_what_asks_for_nothing_is_accepted(gateway: RunningGateway) -> None:
    reply = ask(
        gateway,
        tools=[],
        tool_choice="auto",
        text={"format": {"type": "text"}},
        store=False,
        include=[],
        truncation="disabled",
        metadata={},
        previous_response_id=None,
        parallel_tool_calls=True,
    )
    assert reply.status == 200


def test_errors_of_the_server_name_the_clients_fields(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    upstream.script = failing(("error", "max_tokens: got 9; the context holds 4"))
    reply = ask(gateway, max_output_tokens=9)
    assert reply.status == 400
    assert reply.error["param"] == "max_output_tokens"


def test_leaving_and_cancelling(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    upstream.script = two_then_wait
    body = {"model": "pocketllm", "input": "x", "stream": True}
    connection = open_request(gateway, "/v1/responses", body)
    read_until(connection, b"output_text.delta")
    connection.close()
    upstream.wait_for(lambda: bool(upstream.cancelled_ids), "cancelled when the client left")
    with open_request(gateway, "/v1/responses", body) as connection:
        head = read_until(connection, b"response.in_progress").decode()
        name = json.loads(head.split("data: ")[1].split("\n")[0])["response"]["id"]
        assert call(gateway, "DELETE", f"/v1/requests/{name}").status == 200
        rest = read_until(connection, b"response.failed")
        assert b'"code": "request_cancelled"' in rest


# --- the OpenAI SDK -------------------------------------------------------------------------------


def test_sdk(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(model="pocketllm", input="Hi", max_output_tokens=64)
    assert answer.output_text == TEXT
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    again = sdk.responses.create(
        model="pocketllm",
        input=[*answer.output, {"role": "user", "content": "And?"}],  # type: ignore[list-item]
    )
    assert again.output_text == TEXT


def test_sdk_stream(sdk: openai.OpenAI) -> None:
    events = list(sdk.responses.create(model="pocketllm", input="Hi", stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
    assert isinstance(events[-1], ResponseCompletedEvent)
    limited = sdk.responses.create(model="pocketllm", input="Hi", stream=True, max_output_tokens=1)
    assert isinstance(list(limited)[-1], ResponseIncompleteEvent)


def test_sdk_stream_helper(sdk: openai.OpenAI) -> None:
    """The SDK's accumulator, which checks how the events fit together."""
    with sdk.responses.stream(model="pocketllm", input="Hi") as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == TEXT


def test_sdk_errors(sdk: openai.OpenAI, upstream: FakeUpstream) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.responses.create(model="pocketllm", input="Hi", previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    upstream.script = failing(("chunk", ("a", (1,), "")), ("error", "computing failed: boom"))
    stream = sdk.responses.create(model="pocketllm", input="Hi", stream=True)
    failures = [event for event in stream if event.type in ("error", "response.failed")]
    assert len(failures) == 2


def test_sdk_async(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0
        ) as client:
            answers = await asyncio.gather(
                *(client.responses.create(model="pocketllm", input=f"{i}") for i in range(8))
            )
            assert [answer.output_text for answer in answers] == [TEXT] * 8
            upstream.script = wait_first
            task = asyncio.create_task(client.responses.create(model="pocketllm", input="x"))
            await asyncio.to_thread(upstream.wait_for_requests, 9)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            last = upstream.received[-1].id
            await asyncio.to_thread(
                upstream.wait_for, lambda: last in upstream.cancelled_ids, "cancelled by id"
            )

    asyncio.run(main())
