"""LangChain's ChatOpenAI against the gateway (`make client-test` installs it)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_upstream import WORDS, FakeUpstream, failing, two_then_wait
from gateway_server import RunningGateway

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed (make client-test)"
)
TEXT = "".join(WORDS)


@pytest.fixture
def model(gateway: RunningGateway) -> Any:
    return langchain_openai.ChatOpenAI(
        model="pocketllm",
        base_url=f"{gateway.url}/v1",
        api_key="none",
        max_retries=0,
        stream_usage=True,  # off by default with a base_url
    )


def test_invoke(model: Any, upstream: FakeUpstream) -> None:
    answer = model.invoke([("system", "Be brief."), ("human", "Hello")])
    assert answer.content == TEXT
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] == 5
    assert '"system"' in upstream.received[-1].inputs["messages"]


def test_stream_and_batch(model: Any) -> None:
    chunks = list(model.stream("Hello"))
    assert "".join(chunk.content for chunk in chunks) == TEXT
    used = [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata]
    assert used == [5]
    assert [answer.content for answer in model.batch(["a", "b", "c"])] == [TEXT] * 3


def test_parameters_and_stop(model: Any, upstream: FakeUpstream) -> None:
    tuned = model.bind(max_tokens=2, temperature=0.5, seed=7)
    assert tuned.invoke("Hello", stop=["END"]).content == "Hello,"
    sent = upstream.received[-1].parameters
    assert (sent["max_tokens"], sent["temperature"], sent["seed"]) == (2, 0.5, 7)
    assert sent["stop"] == ["END"]


def test_async_and_leaving_early(model: Any, upstream: FakeUpstream) -> None:
    async def main() -> None:
        answers = await asyncio.gather(*(model.ainvoke("Hello") for _ in range(8)))
        assert [answer.content for answer in answers] == [TEXT] * 8
        upstream.script = two_then_wait
        stream = model.astream("Hello")
        assert (await anext(stream)).content in ("", "one")
        await stream.aclose()

    asyncio.run(main())
    upstream.wait_for(upstream.received[-1].over.is_set, "cancelled upstream")


def test_errors(model: Any, upstream: FakeUpstream) -> None:
    with pytest.raises(Exception, match="temperature"):
        model.bind(temperature=9).invoke("Hello")
    upstream.script = failing(("error", "8 requests are waiting; retry later"))
    with pytest.raises(Exception, match="8 requests are waiting"):
        model.invoke("Hello")
