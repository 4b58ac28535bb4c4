"""The real OpenAI SDK against the gateway: sync, async, streams, errors, leaving early."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from fake_upstream import WORDS, FakeUpstream, failing, two_then_wait, wait_first
from gateway_server import RunningGateway

MESSAGES = [{"role": "user", "content": "two words"}]
TEXT = "".join(WORDS)


@pytest.fixture
def sdk(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model="pocketllm", messages=MESSAGES, max_tokens=2)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "Hello,"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert answer.usage.prompt_tokens_details is not None
    assert answer._request_id


def test_chat_stream(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="pocketllm",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_stream_helper(sdk: openai.OpenAI) -> None:
    """The SDK's own accumulator, which is stricter about the events."""
    with sdk.chat.completions.stream(model="pocketllm", messages=MESSAGES) as stream:  # type: ignore[arg-type]
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == TEXT
    assert final.choices[0].message.content == TEXT
    assert final.choices[0].finish_reason == "stop"


def test_completions(sdk: openai.OpenAI, upstream: FakeUpstream) -> None:
    answer = sdk.completions.create(model="pocketllm", prompt=["a", "b"], n=2)
    assert [choice.text for choice in answer.choices] == [TEXT] * 4
    stream = sdk.completions.create(model="pocketllm", prompt=[1, 2], stream=True, seed=4)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT
    assert upstream.received[-1].inputs == {"input_ids": [1, 2]}


@pytest.mark.parametrize("n", [1, 2])
def test_log_probabilities(sdk: openai.OpenAI, n: int) -> None:
    asked = {"model": "pocketllm", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    answer = sdk.chat.completions.create(**asked, n=n)  # type: ignore[call-overload]
    stream = sdk.chat.completions.create(**asked, n=n, stream=True)  # type: ignore[call-overload]
    streamed: dict[int, list[object]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed.setdefault(choice.index, []).extend(choice.logprobs.content)
    for index, choice in enumerate(answer.choices):
        content = choice.logprobs.content
        assert "".join(item.token for item in content) == choice.message.content == TEXT
        assert [item.logprob for item in content] == [-1.0, -2.0, -3.0, -4.0, -5.0]
        assert [len(item.top_logprobs) for item in content] == [2] * 5
        assert streamed[index] == content
    text = sdk.completions.create(model="pocketllm", prompt="a", logprobs=1)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == TEXT
    assert logprobs.text_offset == [0, 5, 6, 11, 17]


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["pocketllm"]
    assert sdk.models.retrieve("pocketllm").owned_by == "pocketllm"


def test_errors(sdk: openai.OpenAI, upstream: FakeUpstream) -> None:
    def ask(**change: object) -> object:
        body = {"model": "pocketllm", "messages": MESSAGES, **change}
        return sdk.chat.completions.create(**body)  # type: ignore[call-overload]

    with pytest.raises(openai.BadRequestError) as bad:
        ask(temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as bad:
        ask(tools=[{"type": "function", "function": {"name": "f"}}])
    assert (bad.value.param, bad.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-99")
    assert missing.value.code == "model_not_found"
    upstream.script = failing(("error", "8 requests are waiting; retry later"))
    with pytest.raises(openai.InternalServerError) as busy:
        ask()
    assert (busy.value.status_code, busy.value.code) == (503, "overloaded")


def test_an_error_in_a_stream_is_raised(sdk: openai.OpenAI, upstream: FakeUpstream) -> None:
    upstream.script = failing(("chunk", ("a", (1,), "")), ("error", "computing failed: boom"))
    stream = iter(sdk.completions.create(model="pocketllm", prompt="x", stream=True))
    assert next(stream).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="boom"):
        next(stream)


def test_the_sdk_retries_what_the_server_asks_to_retry(
    gateway: RunningGateway, upstream: FakeUpstream
) -> None:
    script = upstream.script

    def busy_at_first(received: object) -> object:
        if len(upstream.received) <= 3:  # the gateway's own attempts at the first request
            return iter([("error", "8 requests are waiting; retry later")])
        return script(received)  # type: ignore[arg-type]

    upstream.script = busy_at_first  # type: ignore[assignment]
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=1) as client:
        answer = client.completions.create(model="pocketllm", prompt="x")
    assert answer.choices[0].text == TEXT


def test_closing_a_stream_cancels(sdk: openai.OpenAI, upstream: FakeUpstream) -> None:
    upstream.script = two_then_wait
    stream = sdk.completions.create(model="pocketllm", prompt="x", stream=True)
    assert next(iter(stream)).choices[0].text == "one"
    stream.close()
    (received,) = upstream.received
    upstream.wait_for(received.over.is_set, "cancelled upstream")


def test_a_timeout_of_the_sdk_cancels(sdk: openai.OpenAI, upstream: FakeUpstream) -> None:
    upstream.script = wait_first
    for seconds in (0.3, 3.0, 30.0):  # until the request arrives before the timeout
        with pytest.raises(openai.APITimeoutError):
            sdk.with_options(timeout=seconds).completions.create(model="pocketllm", prompt="x")
        if upstream.received:
            break
    name = upstream.received[0].id
    upstream.wait_for(lambda: name in upstream.cancelled_ids, "cancelled by id")


def test_async(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0
        ) as client:

            async def one(number: int) -> str:
                stream = await client.chat.completions.create(
                    model="pocketllm",
                    messages=MESSAGES,  # type: ignore[arg-type]
                    stream=True,
                    seed=number,
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            assert await asyncio.gather(*(one(i) for i in range(32))) == [TEXT] * 32
            answer = await client.completions.create(model="pocketllm", prompt="x")
            assert answer.choices[0].text == TEXT
            upstream.script = wait_first
            task = asyncio.create_task(client.completions.create(model="pocketllm", prompt="x"))
            while len(upstream.received) < 34:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            last = upstream.received[-1].id
            await asyncio.to_thread(
                upstream.wait_for, lambda: last in upstream.cancelled_ids, "cancelled by id"
            )

    asyncio.run(main())


def test_async_errors_and_leaving_a_stream(gateway: RunningGateway, upstream: FakeUpstream) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0
        ) as client:
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.completions.create(model="pocketllm", prompt="x", temperature=9)
            upstream.script = two_then_wait
            stream = await client.completions.create(model="pocketllm", prompt="x", stream=True)
            assert (await anext(aiter(stream))).choices[0].text == "one"
            await stream.close()

    asyncio.run(main())
    upstream.wait_for(upstream.received[-1].over.is_set, "cancelled upstream")
