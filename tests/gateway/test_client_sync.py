"""The synchronous client against the scripted upstream."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator

import grpc
import pytest
from fake_upstream import (
    WAIT,
    WORDS,
    FakeUpstream,
    chunk_response,
    failing,
    two_then_wait,
    wait_first,
    words,
)
from reading import closed_once_reading

from pocket_client import (
    Client,
    DeadlineExceededError,
    GenerationOptions,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PocketClientError,
    RequestCancelledError,
    RetryPolicy,
    ServerError,
    ShuttingDownError,
    UnavailableError,
    UnsupportedError,
    Usage,
)

ENSEMBLE = "in ensemble 'pocketllm', "
TEXT = "".join(WORDS)


@pytest.fixture
def client(upstream: FakeUpstream) -> Iterator[Client]:
    with Client(upstream.address, timeout=WAIT) as made:
        yield made


def test_stream_and_completion_agree(client: Client, upstream: FakeUpstream) -> None:
    with client.stream("two words") as stream:
        chunks = list(stream)
    assert [chunk.text for chunk in chunks] == list(WORDS)
    assert [chunk.finish_reason for chunk in chunks] == [None] * 4 + ["stop"]
    completion = stream.completion
    assert completion.text == TEXT
    assert completion.token_ids == (1, 2, 3, 4, 5)
    assert completion.usage == Usage(2, 5, 1)
    whole = client.generate("two words")
    assert (whole.text, whole.token_ids, whole.usage) == (TEXT, (1, 2, 3, 4, 5), Usage(2, 5, 1))
    assert [received.stream for received in upstream.received] == [True, False]


def test_several_outputs_with_log_probabilities(client: Client, upstream: FakeUpstream) -> None:
    options: GenerationOptions = {
        "n": 2,
        "logprobs": 1,
        "prompt_logprobs": 0,
        "return_timings": True,
    }
    with client.stream("two words", **options) as stream:
        chunks = list(stream)
    whole = client.generate("two words", **options)
    for completion in (stream.completion, whole):
        assert [output.text for output in completion.outputs] == [TEXT, TEXT]
        assert [output.index for output in completion.outputs] == [0, 1]
        assert completion.usage == Usage(2, 10, 1)
        for output in completion.outputs:
            assert output.token_ids == (1, 2, 3, 4, 5)
            assert [item.chosen.token for item in output.logprobs] == list(WORDS)
            assert [item.top[0].token for item in output.logprobs] == ["<1>"] * 5
            assert output.cumulative_logprob == -15.0
            assert output.timings == {"ttft_seconds": 0.5}
        first, second = completion.prompt_logprobs
        assert first is None
        assert second is not None
        assert (second.chosen.logprob, second.chosen.rank, second.top) == (-1.0, None, ())
    assert [chunk.index for chunk in chunks] == [0] * 5 + [1] * 5
    assert whole == dataclasses.replace(stream.completion, request_id=whole.request_id)
    with client.stream("x", n=2) as left:  # an output's end is not the request's
        for chunk in left:
            if chunk.finish_reason is not None:
                break
    upstream.wait_for(lambda: left.request_id in upstream.cancelled_ids, "the rest is cancelled")


def test_options_reach_the_wire(client: Client, upstream: FakeUpstream) -> None:
    client.generate(
        [7, 8, 9],
        max_tokens=2,
        temperature=0.5,
        seed=2**64 - 1,
        stop=["a", "b"],
        logit_bias={3: -1.5},
        stop_token_ids=(4,),
        ignore_eos=True,
        request_id="mine",
    )
    received = upstream.received[0]
    assert received.id == "mine"
    assert received.inputs == {"input_ids": [7, 8, 9]}
    timeout = received.parameters.pop("timeout_ms")
    assert 0 < timeout <= WAIT * 1000
    assert received.parameters == {
        "max_tokens": 2,
        "temperature": 0.5,
        "seed": 2**64 - 1,
        "stop": ["a", "b"],
        "logit_bias": {"3": -1.5},
        "stop_token_ids": [4],
        "ignore_eos": True,
        "stream": False,
    }


def test_chat_reaches_the_wire(client: Client, upstream: FakeUpstream) -> None:
    client.chat(
        [{"role": "user", "content": "héllo"}],
        continue_final_message=True,
        chat_template_kwargs={"a": 1},
        headers={"traceparent": "x"},
    )
    received = upstream.received[0]
    assert received.inputs == {
        "messages": '[{"role": "user", "content": "h\\u00e9llo"}]',
        "continue_final_message": True,
        "chat_template_kwargs": '{"a": 1}',
    }
    assert received.metadata["traceparent"] == "x"
    chunks = list(client.chat_stream([{"role": "user", "content": "x"}], max_tokens=2))
    assert [chunk.text for chunk in chunks] == ["Hello", ","]
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"temprature": 1}, TypeError),
        ({"request_id": "two words"}, ValueError),
        ({"request_id": ""}, ValueError),
        ({"headers": {"x": "a\r\nb: c"}}, ValueError),
        ({"timeout": 0}, ValueError),
    ],
)
def test_arguments_that_cannot_be_sent(
    client: Client, upstream: FakeUpstream, arguments: dict[str, object], problem: type[Exception]
) -> None:
    with pytest.raises(problem):
        client.stream("x", **arguments)  # type: ignore[arg-type]
    assert not upstream.received


@pytest.mark.parametrize(
    ("message", "kind", "field"),
    [
        (f"{ENSEMBLE}max_tokens: got 0; must be 1", InvalidRequestError, "max_tokens"),
        (f"{ENSEMBLE}messages[0].role: got 'x'", InvalidRequestError, "messages[0].role"),
        (f"{ENSEMBLE}temprature: unknown field; see docs", InvalidRequestError, "temprature"),
        (f"{ENSEMBLE}unsupported: n: got 2; leave it out", UnsupportedError, "n"),
        (f"{ENSEMBLE}unsupported: penalties: not here", UnsupportedError, None),
        (f"{ENSEMBLE}8 requests are waiting (max_queue 8); retry later", OverloadedError, None),
        ("the engine is shutting down; send the request elsewhere", ShuttingDownError, None),
        ("[request id: r] Server is stopping, scheduler for model has", ShuttingDownError, None),
        (f"{ENSEMBLE}not finished within 0.05 s of arrival", DeadlineExceededError, None),
        (f"{ENSEMBLE}request 'a': not finished within 2 s of arrival", DeadlineExceededError, None),
        (f"{ENSEMBLE}request 'a': cancelled", RequestCancelledError, None),
        ("Request for unknown model: 'pocketllm' is not found", ModelNotFoundError, None),
        ("Request for unknown model: 'm' has no available versions", ShuttingDownError, None),
        ("Request for unknown model: 'm' version 1 is not at ready state", ShuttingDownError, None),
        (f"{ENSEMBLE}internal error: ZeroDivisionError", ServerError, None),
        (f"{ENSEMBLE}computing this request failed: boom", ServerError, None),
    ],
)
def test_error_texts_become_types(
    upstream: FakeUpstream, message: str, kind: type[PocketClientError], field: str | None
) -> None:
    upstream.script = failing(("error", message))
    with Client(upstream.address, retry=RetryPolicy(attempts=1)) as client:
        ids = []
        for call in (client.generate, lambda prompt: list(client.stream(prompt))):
            with pytest.raises(PocketClientError) as caught:
                call("x")
            assert type(caught.value) is kind
            assert getattr(caught.value, "field", None) == field
            assert "in ensemble" not in str(caught.value)
            assert "request 'a'" not in str(caught.value)
            ids.append(upstream.received[-1].id)
    assert not {*ids} & {*upstream.cancelled_ids}  # the server itself ended them


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "gone", UnavailableError),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Received message larger than max",
            InvalidRequestError,
        ),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "quota", OverloadedError),
        (grpc.StatusCode.NOT_FOUND, "no model", ModelNotFoundError),
        (grpc.StatusCode.INVALID_ARGUMENT, "top_p: got 2; no", InvalidRequestError),
        (grpc.StatusCode.UNKNOWN, "what", ServerError),
    ],
)
def test_grpc_codes_become_types(
    upstream: FakeUpstream, code: grpc.StatusCode, details: str, kind: type[PocketClientError]
) -> None:
    upstream.script = failing(("abort", (code, details)))
    with Client(upstream.address, retry=RetryPolicy(attempts=1)) as client:
        with pytest.raises(PocketClientError) as caught:
            client.generate("x")
        assert type(caught.value) is kind


def test_unavailable_is_retried_until_it_answers(client: Client, upstream: FakeUpstream) -> None:
    def flaky(received: object) -> Iterator[tuple[str, object]]:
        if len(upstream.received) < 3:
            return iter([("abort", (grpc.StatusCode.UNAVAILABLE, "starting"))])
        return words(received)  # type: ignore[arg-type]

    upstream.script = flaky
    assert client.generate("x").text == TEXT
    assert len(upstream.received) == 3
    upstream.received.clear()
    assert "".join(chunk.text for chunk in client.stream("x")) == TEXT
    assert len(upstream.received) == 3


def test_nothing_is_retried_once_something_arrived(client: Client, upstream: FakeUpstream) -> None:
    upstream.script = failing(
        ("chunk", ("a", (1,), "")), ("abort", (grpc.StatusCode.UNAVAILABLE, "crash"))
    )
    stream = client.stream("x")
    assert next(stream).text == "a"
    with pytest.raises(UnavailableError, match="crash"):
        next(stream)
    assert list(stream) == []
    assert len(upstream.received) == 1


def test_what_no_retry_can_help_is_not_retried(client: Client, upstream: FakeUpstream) -> None:
    upstream.script = failing(("error", "max_tokens: got 0; no"))
    with pytest.raises(InvalidRequestError):
        client.generate("x")
    assert len(upstream.received) == 1


def test_nobody_listens() -> None:
    with (
        Client("127.0.0.1:9", retry=RetryPolicy(attempts=2, initial_seconds=0.01)) as client,
        pytest.raises(UnavailableError),
    ):
        client.generate("x")


def test_retries_end_with_the_deadline() -> None:
    started = time.monotonic()
    retry = RetryPolicy(attempts=10_000, initial_seconds=0.1, factor=1)
    with Client("127.0.0.1:9", retry=retry) as client, pytest.raises(PocketClientError):
        client.generate("x", timeout=0.4)
    assert time.monotonic() - started < WAIT  # all its attempts would take a quarter of an hour


def test_t14_an_empty_final_response_is_no_chunk(client: Client, upstream: FakeUpstream) -> None:
    upstream.script = lambda received: iter([*words(received), ("empty", None)])
    assert [chunk.text for chunk in client.stream("x")] == list(WORDS)
    upstream.script = failing(("empty", None), ("chunk", ("only", (1,), "stop")))
    assert [chunk.text for chunk in client.stream("x")] == ["only"]


def test_a_stream_without_an_end_is_an_error(upstream: FakeUpstream) -> None:
    upstream.script = failing(("chunk", ("a", (1,), "")))
    with Client(upstream.address) as client:
        stream = client.stream("x")
        next(stream)
        with pytest.raises(UnavailableError, match="without a final response"):
            next(stream)


@pytest.mark.parametrize("field", ["outputs", "raw_output_contents"])
def test_malformed_responses_are_errors(upstream: FakeUpstream, field: str) -> None:
    response = chunk_response("a", (1,), "stop", "", 1, 1)
    getattr(response.infer_response, field).pop()
    upstream.script = failing(("raw", response))
    with Client(upstream.address) as client, pytest.raises(ServerError, match="malformed"):
        client.generate("x")


def test_stop_reasons(client: Client, upstream: FakeUpstream) -> None:
    upstream.script = failing(("chunk", ("a", (1,), "stop", "42")))
    assert client.generate("x", stop_token_ids=[42]).stop_reason == 42
    assert client.generate("x", stop="42").stop_reason == "42"
    upstream.script = failing(("chunk", ("a", (1,), "stop", "")))
    assert client.generate("x", stop="42").stop_reason is None


# --- leaving early ------------------------------------------------------------------------------


def leave_by_break(client: Client) -> None:
    for _ in client.stream("x"):
        break


def leave_by_close(client: Client) -> None:
    stream = client.stream("x")
    next(stream)
    stream.close()
    assert list(stream) == []


def leave_by_exception(client: Client) -> None:
    with contextlib.suppress(ZeroDivisionError), client.stream("x") as stream:
        len(next(stream).text) / 0


def leave_by_forgetting(client: Client) -> None:
    stream = client.stream("x")
    next(stream)
    del stream
    gc.collect()


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_close, leave_by_exception, leave_by_forgetting]
)
def test_leaving_cancels(client: Client, upstream: FakeUpstream, leave: object) -> None:
    upstream.script = two_then_wait
    leave(client)  # type: ignore[operator]
    (received,) = upstream.wait_for_requests(1)
    upstream.wait_for(received.over.is_set, "the RPC is cancelled")
    upstream.wait_for(lambda: received.id in upstream.cancelled_ids, "cancelled by id")


def test_before_the_first_chunk_only_the_id_helps(client: Client, upstream: FakeUpstream) -> None:
    upstream.script = wait_first
    stream = client.stream("x", request_id="early")
    upstream.wait_for_requests(1)
    with upstream.controls_held():
        started = time.monotonic()
        stream.close()
        assert time.monotonic() - started < WAIT / 2  # it does not wait for the server's answer
    upstream.wait_for(lambda: "early" in upstream.cancelled_ids, "cancelled by id")


def test_closing_from_another_thread_wakes_the_reader(
    client: Client, upstream: FakeUpstream
) -> None:
    upstream.script = wait_first
    stream = client.stream("x")
    with closed_once_reading(stream), pytest.raises(RequestCancelledError):
        next(stream)


def test_cancel_by_id_ends_the_stream(client: Client, upstream: FakeUpstream) -> None:
    upstream.script = two_then_wait
    stream = client.stream("x", request_id="mine")
    assert [next(stream).text, next(stream).text] == ["one", " two"]
    assert client.cancel("mine") == 1
    with pytest.raises(RequestCancelledError):
        next(stream)
    assert client.cancel("mine") == 0


def test_a_timeout_frees_the_server(upstream: FakeUpstream) -> None:
    upstream.script = wait_first  # a server that does not even keep deadlines
    with Client(upstream.address) as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            client.generate("x", timeout=0.2, request_id="slow")
        assert 0.2 <= time.monotonic() - started < WAIT / 2
        upstream.wait_for(lambda: "slow" in upstream.cancelled_ids, "cancelled by id")


def test_close_sends_pending_cancels(upstream: FakeUpstream) -> None:
    upstream.script = two_then_wait
    with Client(upstream.address) as client:
        streams = [client.stream("x", request_id=f"r{i}") for i in range(4)]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.close()
    assert {"r0", "r1", "r2", "r3"} <= set(upstream.cancelled_ids)
    with pytest.raises(UnavailableError, match="closed"):
        client.generate("x")


# --- T11 ----------------------------------------------------------------------------------------


def test_t11_one_channel_carries_many_streams(client: Client, upstream: FakeUpstream) -> None:
    upstream.script = two_then_wait
    streams = [client.stream("x") for _ in range(50)]
    assert [next(stream).text for stream in streams] == ["one"] * 50
    assert len(upstream.connections) == 1
    for stream in streams[:25]:
        stream.close()  # neither blocks nor disturbs the others
    upstream.release()
    for stream in streams[25:]:
        assert "".join(chunk.text for chunk in stream) == " two end"


def test_other_calls(client: Client) -> None:
    assert client.tokenize("abc") == (97, 98, 99)
    assert client.tokenize([{"role": "user"}], add_generation_prompt=False)
    assert client.detokenize((104, 105)) == "hi"
    assert client.stats() == {"running": 0}
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        client.tokenize("")
    for bad in ([], [-1], [2**31]):
        with pytest.raises(InvalidRequestError):
            client.detokenize(bad)
