"""How tokens share chunks: never the first one, never at the cost of text, never for ever."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from engine_support import wait_until
from triton_doubles import InferenceResponse, Request, ints, make_pb_utils, model_args

from pocket_backend.api import ConfigurationError, SamplingParams
from pocket_backend.text import chunk_text
from pocket_backend.triton.generator import GeneratorModel
from pocket_backend.triton.pacing import MAX_SECONDS, Pacing
from pocket_backend.triton.settings import GeneratorSettings

HOUR_MS = 10_000  # the largest that is allowed: no chunk of a test comes by its time


@pytest.fixture
def paced(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GeneratorModel]:
    """A generator whose interval is the test's parameter, in milliseconds."""
    monkeypatch.setenv("POCKETLLM_FAKE_OPTIONS", json.dumps({"delay_seconds": 0.002}))
    settings = {"model": "fake", "drain_seconds": "0", "stream_interval_ms": str(request.param)}
    made = GeneratorModel(make_pb_utils(), model_args(**settings))
    yield made
    made.close()


def streamed(*, ensemble: bool = True, **fields: object) -> Request:
    inputs = {"input_ids": ints(1), "stream": np.array([True])}
    if ensemble:
        inputs["errors_as_output"] = np.array([True])
    return Request(inputs, parameters={"max_tokens": 30, "ignore_eos": True, **fields})


def ids_of(responses: list[InferenceResponse]) -> list[int]:
    return [int(i) for response in responses for i in response.ids("token_ids")]


def text_of(model: GeneratorModel, responses: list[InferenceResponse]) -> str:
    assert model.token_bytes is not None
    return "".join(
        chunk_text(r.ids("context_ids"), r.ids("token_ids"), r.ids("text_range"), model.token_bytes)  # type: ignore[arg-type]
        for r in responses
    )


def expected(model: GeneratorModel, max_tokens: int = 30) -> tuple[list[int], str]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    events = list(model._engine.generate([1], sampling_params=params))
    tokens = [int(e["token_id"]) for e in events if e["type"] == "token"]  # type: ignore[call-overload]
    return tokens, "".join(str(event["text"]) for event in events)


@pytest.mark.parametrize("paced", [HOUR_MS], indirect=True)
def test_the_first_token_and_the_end_never_wait(paced: GeneratorModel) -> None:
    asked = streamed()
    paced.execute([asked])
    responses = asked.sender.wait()
    assert len(responses) == 2
    assert len(responses[0].ids("token_ids")) == 1
    assert (ids_of(responses), text_of(paced, responses)) == expected(paced)
    assert [int(r.tensors["num_output_tokens"][0]) for r in responses] == [1, 30]


@pytest.mark.parametrize("paced", [HOUR_MS], indirect=True)
def test_outputs_of_one_request_are_paced_apart(paced: GeneratorModel) -> None:
    asked = streamed(n=3, temperature=1.0, seed=5)
    paced.execute([asked])
    by_output: dict[int, list[InferenceResponse]] = {0: [], 1: [], 2: []}
    for response in asked.sender.wait():
        by_output[int(response.tensors["sequence_index"][0])].append(response)
    assert {index: len(found) for index, found in by_output.items()} == {0: 2, 1: 2, 2: 2}
    assert all(len(ids_of(found)) == 30 for found in by_output.values())


@pytest.mark.parametrize("paced", [HOUR_MS], indirect=True)
def test_the_generator_alone_sends_every_token(paced: GeneratorModel) -> None:
    asked = streamed(ensemble=False)
    paced.execute([asked])
    responses = asked.sender.wait()
    assert (ids_of(responses), text_of(paced, responses)) == expected(paced)
    assert len(responses) > 20


@pytest.mark.parametrize("paced", [15], indirect=True)
def test_a_chunk_comes_once_its_time_has_passed(paced: GeneratorModel) -> None:
    """A step takes 2 ms at least, so a chunk has 8 tokens or so at most, on any machine."""
    asked = streamed(max_tokens=400)
    paced.execute([asked])
    responses = asked.sender.wait()
    seconds = 400 * 0.002
    assert len(ids_of(responses)) == 400
    assert 2 < len(responses) < 400
    assert len(responses) >= seconds / 0.015 / 4


@pytest.mark.parametrize("paced", [HOUR_MS], indirect=True)
def test_what_waits_goes_out_though_its_output_makes_no_token(paced: GeneratorModel) -> None:
    """A paused output (preempted, say) must not keep its last tokens: other steps flush them."""
    asked = streamed(max_tokens=4000)
    paced.execute([asked])
    wait_until(lambda: bool(paced._streams))
    (stream,) = paced._streams.values()
    wait_until(lambda: stream.holds)

    def flush() -> None:
        sent = len(asked.sender.responses)
        stream.flush(time.monotonic())
        assert len(asked.sender.responses) == sent
        stream.flush(time.monotonic() + 2 * HOUR_MS)
        assert len(asked.sender.responses) == sent + 1
        assert not stream.holds
        flushed.set()

    flushed = threading.Event()
    paced._engine.post(flush)
    assert flushed.wait(60)
    paced._engine.cancel(stream.key)
    ids = ids_of(asked.sender.wait())
    tokens, _ = expected(paced, max_tokens=len(ids))
    assert ids == tokens


@pytest.mark.parametrize("paced", [HOUR_MS], indirect=True)
def test_every_step_looks_after_what_waits(
    paced: GeneratorModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = streamed(max_tokens=4000)
    paced.execute([asked])
    wait_until(lambda: bool(paced._streams))
    (stream,) = paced._streams.values()
    looked = threading.Event()
    monkeypatch.setattr(stream, "flush", lambda _now: looked.set())
    assert looked.wait(60)
    paced._engine.cancel(stream.key)
    asked.sender.wait()


@pytest.mark.parametrize("paced", [20], indirect=True)
def test_a_chunk_that_cannot_be_sent_ends_its_request(paced: GeneratorModel) -> None:
    asked = streamed(max_tokens=4000)
    paced.execute([asked])
    wait_until(lambda: len(asked.sender.responses) > 1)

    def fail(_response: InferenceResponse | None) -> None:
        raise RuntimeError("Failed to send")

    asked.sender.fail = fail
    wait_until(lambda: not paced._streams)
    assert asked.sender.finals <= 1
    assert paced._engine.stats().running == 0


def test_auto_bounds_the_chunks_of_all_streams_together() -> None:
    auto = Pacing()
    for streams in range(1, 200):
        assert streams / auto.interval(streams) <= max(100 + 1e-6, streams / MAX_SECONDS)
        assert auto.interval(streams) <= MAX_SECONDS
    assert Pacing(0.25).interval(64) == 0.25


@pytest.mark.parametrize("value", ["-1", "fast", "nan", "10001"])
def test_a_bad_interval_names_the_setting(value: str) -> None:
    config = json.dumps({"parameters": {}})
    environ = {"POCKETLLM_MODEL": "fake", "POCKETLLM_STREAM_INTERVAL_MS": value}
    with pytest.raises(ConfigurationError, match=r"POCKETLLM_STREAM_INTERVAL_MS.*auto"):
        GeneratorSettings.from_model_config(config, environ)
