"""The clients and the gateway against a real Triton server (fake engine, one token per byte).

What the scripted upstream of the other tests claims about the wire is held true here: forms of
answers, texts of errors, cancellation, counts.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_server import RunningGateway, call, open_request, read_until

from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports
from pocket_client import (
    AsyncClient,
    Client,
    Completion,
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PocketClientError,
    RequestCancelledError,
    RetryPolicy,
    UnsupportedError,
)
from pocket_client.gateway.settings import GatewaySettings
from pocket_client.options import GenerationRequest

pytestmark = pytest.mark.triton

ONCE = RetryPolicy(attempts=1)
LONG = {"max_tokens": 4000, "ignore_eos": True}
"""At 10 ms a step: forty seconds or more, if nobody cancels it."""
FREED = 25.0
"""Seconds in which a request that was left must be gone, however slow the machine: well below what
it would run for otherwise."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    environment = {
        "POCKETLLM_FAKE_OPTIONS": json.dumps(
            {
                "delay_seconds": 0.01,
                "max_slots": 4,
                "features": [
                    "batch_mode",
                    "prefix_cache",
                    "block_copies",
                    "min_tokens",
                    "logprobs",
                ],
            }
        ),
        "POCKETLLM_MAX_QUEUE": "4",
    }
    log = tmp_path_factory.mktemp("triton-gateway") / "server.log"
    options = ServerOptions("fake", ports=Ports(0, 0, 0), log_file=log, environment=environment)
    with TritonServer(options) as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def address(request: pytest.FixtureRequest, server: TritonServer) -> str:
    return server.grpc_address if request.param == "grpc" else server.http_url


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout=60, retry=ONCE) as made:
        yield made


@pytest.fixture(scope="module")
def gateway(server: TritonServer) -> Iterator[RunningGateway]:
    with RunningGateway(GatewaySettings(upstream=server.grpc_address)) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left_running(server: TritonServer) -> Iterator[None]:
    yield
    with Client(server.grpc_address) as client:
        wait_until_idle(client)


def wait_until_idle(client: Client) -> None:
    deadline = time.monotonic() + FREED
    while (stats := client.stats())["running"] or stats["waiting"] or stats["open_streams"]:
        assert time.monotonic() < deadline, stats
        time.sleep(0.02)


def wait_until(client: Client, condition: Callable[[dict[str, Any]], bool]) -> None:
    deadline = time.monotonic() + FREED
    while not condition(stats := client.stats()):
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)


def essence(completion: Completion) -> tuple[object, ...]:
    usage = completion.usage
    return (
        completion.text,
        completion.token_ids,
        completion.finish_reason,
        completion.stop_reason,
        usage.prompt_tokens,
        usage.completion_tokens,
    )


def test_all_ways_give_the_same(server: TritonServer) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    found = []
    for address in (server.grpc_address, server.http_url):
        with Client(address) as client:
            found.append(client.generate("héllo", **options))
            with client.stream("héllo", **options) as stream:
                texts = [chunk.text for chunk in stream]
            found.append(stream.completion)
            found.append(client.generate(client.tokenize("héllo"), **options))
            assert len(texts) > 10  # it did stream

        async def ask(address: str = address) -> AsyncIterator[Completion]:
            async with AsyncClient(address) as client:
                yield await client.generate("héllo", **options)
                async with client.stream("héllo", **options) as stream:
                    async for _ in stream:
                        pass
                yield stream.completion

        async def collect(ask: Any = ask) -> list[Completion]:
            return [completion async for completion in ask()]

        found += asyncio.run(collect())
    assert len({essence(completion) for completion in found}) == 1
    assert found[0].usage.prompt_tokens == 6
    assert found[0].finish_reason == "length"
    assert len(found[0].token_ids) == 40


def test_chat_and_stop_strings(client: Client) -> None:
    messages = [{"role": "user", "content": "x"}]
    whole = client.chat(messages, max_tokens=30, ignore_eos=True)
    assert whole.usage.prompt_tokens == len("user: x\nassistant: ")
    position = next(i for i in range(3, 30) if whole.text[i].isprintable() and whole.text[i] != "�")
    stop = whole.text[position]
    cut = client.chat(messages, max_tokens=30, ignore_eos=True, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    token = whole.token_ids[2]
    by_id = client.chat(messages, max_tokens=30, ignore_eos=True, stop_token_ids=[token])
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", token)


def test_tokenize_and_detokenize(client: Client) -> None:
    assert client.tokenize("abc") == (97, 98, 99)
    assert client.tokenize("a") == (97,)
    chat = client.tokenize([{"role": "user", "content": "x"}], add_generation_prompt=False)
    assert bytes(chat) == b"user: x\n"
    assert client.detokenize([72, 105]) == "Hi"
    assert client.detokenize([72]) == "H"
    with pytest.raises(InvalidRequestError):
        client.tokenize("")


@pytest.mark.parametrize(
    ("prompt", "options", "kind", "field"),
    [
        ("x", {"max_tokens": 0}, InvalidRequestError, "max_tokens"),
        ("x", {"temperature": float("nan")}, InvalidRequestError, "sampling_parameters"),
        ("x", {"top_p": 0.0}, InvalidRequestError, "top_p"),
        ("x", {"stop": [""]}, InvalidRequestError, "stop"),
        ("x", {"stop_token_ids": [10**9]}, InvalidRequestError, "stop_token_ids"),
        ("", {}, InvalidRequestError, "text_input"),
        ([10**9], {}, InvalidRequestError, "input_ids"),
        ("x" * 5000, {}, InvalidRequestError, "prompt"),
        ("x", {"presence_penalty": 1.0}, UnsupportedError, None),
        ("x", {"logit_bias": {1: 1.0}}, UnsupportedError, "logit_bias"),
        ("x", {"timeout": 0.1, **LONG}, DeadlineExceededError, None),
    ],
)
def test_error_texts_are_understood(
    client: Client, prompt: Any, options: dict[str, Any], kind: type[Exception], field: str | None
) -> None:
    calls = [client.generate] if "stop" in options else [client.generate, drain(client)]
    for ask in calls:
        with pytest.raises(PocketClientError) as caught:
            ask(prompt, **options)
        assert type(caught.value) is kind, caught.value
        assert getattr(caught.value, "field", None) == field
        assert "in ensemble" not in str(caught.value)


def drain(client: Client) -> Callable[..., object]:
    return lambda prompt, **options: list(client.stream(prompt, **options))


def test_several_outputs_with_log_probabilities(client: Client) -> None:
    options: dict[str, Any] = {
        "n": 3, "logprobs": 2, "temperature": 1.0, "seed": 5, "max_tokens": 8, "ignore_eos": True,
        "return_timings": True,
    }  # fmt: skip
    with client.stream("x", **options) as stream:
        chunks = list(stream)
    whole = client.generate("x", **options)
    assert {chunk.index for chunk in chunks} == {0, 1, 2}
    assert len({output.token_ids for output in whole.outputs}) == 3
    for streamed, output in zip(stream.completion.outputs, whole.outputs, strict=True):
        assert (streamed.text, streamed.token_ids) == (output.text, output.token_ids)
        assert streamed.logprobs == output.logprobs
        assert [item.chosen.token_id for item in output.logprobs] == list(output.token_ids)
        assert all(len(item.top) == 2 for item in output.logprobs)
        total = sum(item.chosen.logprob for item in output.logprobs)
        assert output.cumulative_logprob == pytest.approx(total)
        assert output.timings is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (1, 24)


def test_what_the_clients_never_send_is_understood_too(client: Client) -> None:
    for parameters, kind in (
        ({"n": 0}, InvalidRequestError),
        ({"logprobs": 21}, InvalidRequestError),
        ({"prompt_logprobs": 1}, UnsupportedError),
        ({"best_of": 2}, UnsupportedError),
        ({"temprature": 1}, InvalidRequestError),
        ({"guided_json": "{}"}, UnsupportedError),
    ):
        request = GenerationRequest("mine", text="x", parameters=parameters)
        with pytest.raises(kind) as caught:
            next(client.send(request))
        name = next(iter(parameters))
        assert name in (caught.value.field, getattr(caught.value, "feature", None))


def test_an_unknown_model(server: TritonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pocket_client.wire_http.ENSEMBLE", "nope")
    with Client(server.http_url, retry=ONCE) as client, pytest.raises(ModelNotFoundError):
        client.generate("x")


def test_the_readmes_example_runs(server: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "client" / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    assert "127.0.0.1:8001" in code
    exec(code.replace("127.0.0.1:8001", server.grpc_address), {})
    assert " length 32\n" in capsys.readouterr().out  # 24 bytes of prompt, 8 tokens


# --- cancellation -------------------------------------------------------------------------------


def test_leaving_frees_the_slot(client: Client, server: TritonServer) -> None:
    for chunk in client.stream("x", **LONG):  # type: ignore[arg-type]
        assert chunk.text is not None
        break
    with Client(server.grpc_address) as observer:
        wait_until_idle(observer)


def test_cancelling_tasks_frees_their_slots(address: str, server: TritonServer) -> None:
    """Running and queued, streaming and not: all at once."""

    async def main() -> None:
        async with AsyncClient(address, retry=ONCE) as client:
            tasks = [asyncio.create_task(client.generate(f"{i}", **LONG)) for i in range(6)]  # type: ignore[arg-type]
            deadline = time.monotonic() + FREED
            while (stats := await client.stats())["running"] != 4 or stats["waiting"] != 2:
                assert time.monotonic() < deadline, stats
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    with Client(server.grpc_address) as observer:
        wait_until_idle(observer)


def test_t7_models_unload_after_streams_were_left(server: TritonServer) -> None:
    """Triton 2.51 leaks a request, and its model, when a gRPC stream is cancelled as it ends.

    So leave at every moment around the end of a stream, which comes 10 ms after its first chunk.
    """
    with Client(server.grpc_address) as client:
        for i in range(80):
            stream = client.stream("x", max_tokens=2, ignore_eos=True)
            next(stream)
            time.sleep(0.006 + i * 0.0001)
            stream.close()
        asyncio.run(leave_around_the_end(server.grpc_address))
        with pytest.raises(DeadlineExceededError):
            client.generate("x", timeout=0.05, **LONG)  # type: ignore[arg-type]
    repository(server, "models/pocketllm/unload")
    deadline = time.monotonic() + 60
    while (state := model_state(server)) != "UNAVAILABLE":
        assert time.monotonic() < deadline, state
        time.sleep(0.02)
    repository(server, "models/pocketllm/load")
    assert model_state(server) == "READY"


async def leave_around_the_end(address: str) -> None:
    async with AsyncClient(address) as client:
        for i in range(80):
            stream = client.stream("x", max_tokens=2, ignore_eos=True)
            await anext(stream)
            reader = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.006 + i * 0.0001)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await stream.aclose()


def repository(server: TritonServer, action: str) -> Any:
    request = urllib.request.Request(
        f"{server.http_url}/v2/repository/{action}",
        data=b"{}",
        headers={"pocketllm-admin": server.admin_key},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def model_state(server: TritonServer) -> str:
    models = repository(server, "index")
    return str(next(m for m in models if m["name"] == "pocketllm").get("state"))


def test_cancel_by_id(client: Client) -> None:
    with client.stream("x", request_id="mine", **LONG) as stream:  # type: ignore[arg-type]
        next(stream)
        assert client.cancel("mine") == 1
        with pytest.raises(RequestCancelledError):
            list(stream)
    assert client.cancel("mine") == 0


def test_overload_is_understood(server: TritonServer) -> None:
    with Client(server.grpc_address, retry=ONCE) as client:
        streams = [client.stream(f"{i}", **LONG) for i in range(8)]  # type: ignore[arg-type]
        wait_until(client, lambda stats: stats["running"] == 4 and stats["waiting"] == 4)
        with pytest.raises(OverloadedError):
            client.generate("one too many")
        for stream in streams:
            stream.close()


# --- the gateway --------------------------------------------------------------------------------

CHAT = {
    "model": "pocketllm",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 12,
    "ignore_eos": True,
    "temperature": 0,
}
PATH = "/v1/chat/completions"


def test_t14_all_four_forms_agree(gateway: RunningGateway, server: TritonServer) -> None:
    with Client(server.grpc_address) as client:
        expected = client.chat(CHAT["messages"], max_tokens=12, ignore_eos=True)  # type: ignore[arg-type]
    stop = expected.text[-2:]
    for extra in ({}, {"stop": stop}):
        reply = call(gateway, "POST", PATH, {**CHAT, **extra}).json
        text = reply["choices"][0]["message"]["content"]
        events = call(gateway, "POST", PATH, {**CHAT, **extra, "stream": True}).events
        deltas = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
        assert "".join(deltas) == text
        assert text == (expected.text if not extra else expected.text[:-2])
        reason = "length" if not extra else "stop"
        assert reply["choices"][0]["finish_reason"] == reason
        assert events[-2]["choices"][0]["finish_reason"] == reason
        assert "" not in deltas[1:-1]


def test_usage_counts(gateway: RunningGateway) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "y" * 100}]}
    cold = call(gateway, "POST", PATH, body).json["usage"]
    warm = call(gateway, "POST", PATH, body).json["usage"]
    assert cold["prompt_tokens"] == warm["prompt_tokens"] == len(f"user: {'y' * 100}\nassistant: ")
    assert cold["completion_tokens"] == 12
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["prompt_tokens_details"]["cached_tokens"] >= 96


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(gateway: RunningGateway, stream: bool) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 3, "n": 2, "stream": stream}
    reply = call(gateway, "POST", PATH, body)
    parts = reply.events[:-1] if stream else [reply.json]
    entries = [
        entry
        for part in parts
        for choice in part["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert len(entries) == 24
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)


def test_seeds_and_choices(gateway: RunningGateway) -> None:
    body = {**CHAT, "temperature": 1.0, "seed": 7, "n": 3}
    first = [c["message"]["content"] for c in call(gateway, "POST", PATH, body).json["choices"]]
    again = [c["message"]["content"] for c in call(gateway, "POST", PATH, body).json["choices"]]
    assert first == again
    assert len(set(first)) == 3
    alone = call(gateway, "POST", PATH, {**body, "n": 1}).json["choices"][0]
    assert alone["message"]["content"] == first[0]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": [{"role": "user", "content": "a\0"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"logit_bias": {"a": 5}}, "logit_bias"),
        ({"min_tokens": 50}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_servers_refusals_name_openais_fields(
    gateway: RunningGateway, change: dict[str, Any], param: str, stream: bool
) -> None:
    reply = call(gateway, "POST", PATH, {**CHAT, **change, "stream": stream})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_t8_a_disconnect_frees_the_slot(
    gateway: RunningGateway, server: TritonServer, stream: bool
) -> None:
    connection = open_request(gateway, PATH, {**CHAT, "max_tokens": 4000, "stream": stream})
    with Client(server.grpc_address) as observer:
        wait_until(observer, lambda stats: stats["running"] == 1)
        if stream:
            read_until(connection, b'"content": "')
        connection.close()
        wait_until_idle(observer)


@pytest.mark.slow
def test_t8_a_disconnect_frees_the_slot_within_two_steps(
    tmp_path: Path,
) -> None:
    """Steps are counted by the engine, while a second stream keeps it stepping. They take half a
    second, so that what is counted is not how fast this machine passes a message on."""
    environment = {"POCKETLLM_FAKE_OPTIONS": json.dumps({"delay_seconds": 0.5, "max_slots": 4})}
    log = tmp_path / "server.log"
    options = ServerOptions("fake", ports=Ports(0, 0, 0), log_file=log, environment=environment)
    with (
        TritonServer(options) as server,
        RunningGateway(GatewaySettings(upstream=server.grpc_address)) as gateway,
        Client(server.grpc_address) as observer,
    ):
        body = {**CHAT, "max_tokens": 4000, "stream": True}
        stays, leaves = (open_request(gateway, PATH, body) for _ in range(2))
        for connection in (stays, leaves):
            read_until(connection, b'"content": "')
        wait_until(observer, lambda stats: stats["running"] == 2)
        before = observer.stats()["steps"]
        leaves.close()
        seen: list[dict[str, Any]] = []

        def freed(stats: dict[str, Any]) -> bool:
            seen.append(stats)
            return bool(stats["running"] == 1)

        wait_until(observer, freed)
        # The step that runs when the client leaves is none of the two.
        assert seen[-1]["steps"] - before <= 3
        stays.close()
        wait_until_idle(observer)


def test_ready_and_tokenize(gateway: RunningGateway) -> None:
    assert call(gateway, "GET", "/ready").status == 200
    assert call(gateway, "POST", "/tokenize", {"prompt": "abc"}).json["tokens"] == [97, 98, 99]
    assert call(gateway, "POST", "/detokenize", {"tokens": [72, 105]}).json["prompt"] == "Hi"
    assert call(gateway, "POST", "/detokenize", {"tokens": [99999]}).status in (200, 400)
    assert json.loads(call(gateway, "GET", "/v1/models").body)["data"][0]["id"] == "pocketllm"
