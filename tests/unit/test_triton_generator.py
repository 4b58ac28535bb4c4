"""The generator's runtime over the fake executor and doubles of Triton's objects.

What must hold whatever happens: every sender is ended exactly once, only the engine thread touches
senders, and nothing is kept afterwards.
"""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from engine_support import wait_until
from triton_doubles import (
    InferenceResponse,
    Request,
    Sender,
    ints,
    make_pb_utils,
    model_args,
    strings,
)

from pocket_backend.api import SamplingParams
from pocket_backend.text import chunk_text, chunk_texts
from pocket_backend.triton.backlog import MAX_WAITING
from pocket_backend.triton.feedback import FeedbackSender
from pocket_backend.triton.generator import GeneratorModel

WAIT = 60.0


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[GeneratorModel]:
    yield from make_model(monkeypatch, eos_probability=0.02)


@pytest.fixture
def slow_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[GeneratorModel]:
    """10 ms a step: a long request runs for half a minute, so it is still there to be ended."""
    yield from make_model(monkeypatch, delay_seconds=0.01)


def make_model(monkeypatch: pytest.MonkeyPatch, **options: float) -> Iterator[GeneratorModel]:
    """Unpaced: how many responses there are then depends on no clock (test_triton_pacing.py)."""
    monkeypatch.setenv("POCKETLLM_FAKE_OPTIONS", json.dumps(options))
    settings = {"model": "fake", "drain_seconds": "0", "stream_interval_ms": "0"}
    made = GeneratorModel(make_pb_utils(), model_args(**settings))
    yield made
    made.close()


def request(
    *ids: int,
    stream: bool = True,
    request_id: str = "",
    outputs: tuple[str, ...] = (),
    **fields: object,
) -> Request:
    inputs = {"input_ids": ints(*ids), "stream": np.array([stream])}
    return Request(
        inputs, parameters={"max_tokens": 20, **fields}, request_id=request_id, outputs=outputs
    )


def text_of(model: GeneratorModel, responses: list[InferenceResponse]) -> str:
    """What the detokenizer makes of the responses."""
    table = model._engine.tokenizer.token_bytes  # type: ignore[union-attr]
    return "".join(
        chunk_text(r.ids("context_ids"), r.ids("token_ids"), r.ids("text_range"), table)  # type: ignore[arg-type]
        for r in responses
    )


def in_process(model: GeneratorModel, ids: list[int], **sampling: object) -> tuple[list[int], str]:
    tokens, text = [], ""
    for event in model._engine.generate(ids, sampling_params=SamplingParams(**sampling)):  # type: ignore[arg-type]
        if event["type"] == "token":
            tokens.append(event["token_id"])
        text += event["text"]  # type: ignore[operator]
    return tokens, text


def control(model: GeneratorModel, body: object) -> dict[str, object]:
    asked = Request({"control": strings(json.dumps(body))})
    model.execute([asked])
    (response,) = asked.sender.wait()
    result: dict[str, object] = json.loads(response.text("control_result"))
    return result


def settle(model: GeneratorModel) -> None:
    """Return when the engine thread has done what it was told before."""
    done = threading.Event()
    model._engine.post(done.set)
    assert done.wait(WAIT)


def test_stream_and_single_response_equal_the_engine(model: GeneratorModel) -> None:
    streamed, single = request(1, 2, 3), request(1, 2, 3, stream=False)
    model.execute([streamed, single])
    responses, (whole,) = streamed.sender.wait(), single.sender.wait()
    tokens, text = in_process(model, [1, 2, 3], max_tokens=20)
    assert len(responses) > 1
    assert [t for r in responses for t in r.ids("token_ids")] == tokens
    assert text_of(model, responses) == text
    assert list(whole.ids("token_ids")) == tokens
    assert text_of(model, [whole]) == text
    for last in (responses[-1], whole):
        assert last.text("finish_reason") in ("length", "stop")
        assert last.tensors["num_input_tokens"] == [3]
        assert last.tensors["num_output_tokens"] == [len(tokens)]
    assert all(r.text("finish_reason") == "" for r in responses[:-1])


def test_stop_strings_with_broken_utf8_around_them(model: GeneratorModel) -> None:
    """The merged single response must cover exactly the released bytes, whatever was held back."""
    for seed in range(8):
        _, free = in_process(model, [seed + 1], max_tokens=60, ignore_eos=True)
        stop = next(free[i : i + 2] for i in range(10, 60) if "\ufffd" not in free[i : i + 2])
        asked = {"max_tokens": 60, "ignore_eos": True, "stop": stop}
        streamed, single = request(seed + 1, **asked), request(seed + 1, stream=False, **asked)
        model.execute([streamed, single])
        text = text_of(model, streamed.sender.wait())
        assert text == text_of(model, single.sender.wait()) == free[: free.index(stop)]
        assert streamed.sender.responses[-1].text("stop_reason") == stop


def test_only_requested_outputs_are_built(model: GeneratorModel) -> None:
    asked = request(1, outputs=("token_ids",))
    model.execute([asked])
    assert {name for r in asked.sender.wait() for name in r.tensors} == {"token_ids"}


def per_output(responses: list[InferenceResponse], name: str) -> dict[int, list[object]]:
    """Values of one output by sequence_index, in order."""
    found: dict[int, list[object]] = {}
    for response in responses:
        for index, value in zip(
            response.ids("sequence_index"), response.tensors[name].tolist(), strict=True
        ):
            found.setdefault(index, []).append(value)
    return found


def test_several_outputs_streamed_and_in_one_response(model: GeneratorModel) -> None:
    asked = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    streamed, single = request(5, **asked), request(5, stream=False, **asked)
    first = request(5, **{**asked, "n": 1})
    model.execute([streamed, single, first])
    responses, (whole,) = streamed.sender.wait(), single.sender.wait()
    assert streamed.sender.finals == single.sender.finals == 1
    assert whole.ids("sequence_index") == (0, 1, 2)
    by_output = {i: [r for r in responses if r.ids("sequence_index") == (i,)] for i in range(3)}
    ids = [tuple(t for r in by_output[i] for t in r.ids("token_ids")) for i in range(3)]
    assert len(set(ids)) == 3, "outputs have random streams of their own"
    assert sum(ids, ()) == whole.ids("token_ids")
    assert ids[0] == tuple(t for r in first.sender.wait() for t in r.ids("token_ids"))
    table = model.token_bytes
    assert table is not None
    bounds = whole.ids("text_range")
    texts = chunk_texts(
        (), whole.ids("token_ids"), zip(bounds[::2], bounds[1::2], strict=True), table
    )
    assert texts == [text_of(model, by_output[i]) for i in range(3)]
    reasons = per_output(responses, "finish_reason")
    assert all(values[-1] == b"length" for values in reasons.values())
    assert all(set(values[:-1]) <= {b""} for values in reasons.values())
    assert whole.tensors["finish_reason"].tolist() == [b"length"] * 3
    assert whole.tensors["num_output_tokens"].tolist() == [12, 12, 12]
    assert per_output(responses, "num_output_tokens")[2][-1] == 12


def test_one_failed_output_ends_the_request(model: GeneratorModel) -> None:
    executor = model._engine._backend
    asked = request(3, n=2, max_tokens=4000, ignore_eos=True)

    def fail_the_second(requests: object) -> None:
        names = [item.request_id for item in requests]  # type: ignore[attr-defined]
        executor.faults.failing_requests.update(n for n in names if n.endswith("#1"))  # type: ignore[attr-defined]

    executor.faults.before_step = fail_the_second  # type: ignore[attr-defined]
    try:
        model.execute([asked])
        assert "told to fail" in asked.sender.error.message()
    finally:
        executor.faults.before_step = None  # type: ignore[attr-defined]
    assert asked.sender.finals == 1
    wait_until(lambda: model._engine.stats().running == 0, "the other output to end")


def test_log_probabilities_in_every_response(model: GeneratorModel) -> None:
    streamed, single = request(9, logprobs=2), request(9, stream=False, logprobs=2)
    plain = request(9)
    model.execute([streamed, single, plain])
    responses, (whole,) = streamed.sender.wait(), single.sender.wait()
    entries = [entry for r in responses for entry in json.loads(r.text("logprobs"))]
    assert entries == json.loads(whole.text("logprobs"))
    ids = whole.ids("token_ids")
    assert [next(iter(entry)) for entry in entries] == [str(token) for token in ids]
    assert model.token_bytes is not None
    for token, entry in zip(ids, entries, strict=True):
        assert bytes(entry[str(token)]["bytes"]) == model.token_bytes.get(token, False)
        assert entry[str(token)]["rank"] == 1
        assert [item["rank"] for item in entry.values()] == [1, 2]
    total = sum(entry[str(t)]["logprob"] for t, entry in zip(ids, entries, strict=True))
    for last in (responses[-1], whole):
        assert last.tensors["cumulative_logprob"].tolist() == pytest.approx([total])
    for response in plain.sender.wait():
        assert response.tensors["logprobs"].size == 0
        assert response.tensors["cumulative_logprob"].size == 0


def test_timings_on_request_with_the_last_response(model: GeneratorModel) -> None:
    asked, plain = request(1, return_timings=True), request(1)
    model.execute([asked, plain])
    *before, last = asked.sender.wait()
    assert all(response.tensors["timings"].size == 0 for response in before)
    times = json.loads(last.text("timings"))
    assert 0 < times["ttft_seconds"] <= times["total_seconds"]
    assert all(response.tensors["timings"].size == 0 for response in plain.sender.wait())


def test_t16_cancel_with_log_probabilities(model: GeneratorModel) -> None:
    asked = request(1, n=2, logprobs=5, max_tokens=4000, ignore_eos=True)
    model.execute([asked])
    wait_until(lambda: len(asked.sender.responses) >= 5, "some responses")
    asked.sender.gone = True
    assert asked.sender.error.code() == 7
    wait_until(lambda: model._engine.stats().running == 0, "free slots")


def test_t1_many_at_once_end_exactly_once_on_one_thread(model: GeneratorModel) -> None:
    """T1: 120 concurrent decoupled requests, good and bad."""
    good = [request(*range(1, 2 + i % 50), stream=i % 2 == 0) for i in range(120)]
    bad = [request(1, max_tokens=0), request(1, nonsense=1), Request({}), request(5000)]
    model.execute([*good, *bad])
    for asked in (*good, *bad):
        asked.sender.wait()
    settle(model)
    threads = {name for asked in (*good, *bad) for name in asked.sender.threads}
    assert len(threads) == 1
    assert threading.current_thread().name not in threads
    assert all(asked.sender.finals == 1 for asked in (*good, *bad))
    assert [asked.sender.error.code() for asked in bad] == [3] * 4
    assert control(model, {"stats": True})["open_streams"] == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(1, max_tokens=0), "max_tokens: got 0"),
        (request(1, temperature="NaN"), "temperature: got 'NaN'"),
        (request(1, unheard_of=1), "unheard_of: unknown field"),
        (request(256), "prompt"),
        (request(-1), "prompt"),
        (request(*[1] * 5000), "prompt: got 5000 tokens"),
        (Request({"stream": np.array([True])}), "input_ids: missing"),
        (Request({"input_ids": ints()}), "prompt"),
        (Request({"input_ids": np.array([1.5], dtype=np.float32)}), "input_ids: must be integers"),
        (Request({"input_ids": ints(1), "sampling_parameters": strings(b"\xff")}), "sampling_par"),
        (Request({"control": strings("{}")}), "control: got"),
        (Request({"control": strings("x" * 100_000)}), "control: got"),
        (
            Request({"control": strings('{"stats": true, "cancel_request_id": "x"}')}),
            "control: got",
        ),
    ],
)
def test_bad_requests_get_an_error_and_the_final_flag(
    model: GeneratorModel, asked: Request, message: str
) -> None:
    asked.sender = Sender()  # parametrized objects are shared between runs
    model.execute([asked])
    assert asked.sender.error.message().startswith(message)
    assert asked.sender.error.code() == 3
    assert len(asked.sender.error.message()) < 500
    assert asked.sender.finals == 1


def test_an_exception_while_reading_still_ends_the_sender(model: GeneratorModel) -> None:
    class Broken(Request):
        def inputs(self) -> list:
            raise RuntimeError("secret detail")

    broken, good = Broken({}), request(1)
    model.execute([broken, good])
    assert broken.sender.error.message() == "internal error: RuntimeError"
    assert good.sender.wait()[-1].error is None


def test_client_that_is_gone_frees_its_slot(slow_model: GeneratorModel) -> None:
    model = slow_model
    asked = request(1, max_tokens=3000, ignore_eos=True)
    asked.sender.gone = True
    model.execute([asked])
    assert asked.sender.error.code() == 7
    settle(model)
    stats = control(model, {"stats": True})
    assert (stats["open_streams"], stats["running"], stats["blocks_used"]) == (0, 0, 0)


def started(model: GeneratorModel, request_id: str = "") -> Request:
    """A request that would go on for long, after its first response."""
    seen = threading.Event()
    asked = request(1, max_tokens=3500, ignore_eos=True, request_id=request_id)
    asked.sender.fail = lambda _response: seen.set()
    model.execute([asked])
    assert seen.wait(WAIT)
    return asked


def test_cancel_by_request_id(slow_model: GeneratorModel) -> None:
    """Whoever has seen the end of a request never finds it open: the second cancel finds none."""
    model = slow_model
    asked, other = started(model, "mine"), started(model, "other")
    assert control(model, {"cancel_request_id": "mine"}) == {"cancelled": 1}
    assert asked.sender.error.code() == 7
    assert control(model, {"cancel_request_id": "mine"}) == {"cancelled": 0}
    assert not other.sender.finals


def test_detokenizer_reports_an_abandoned_stream(slow_model: GeneratorModel) -> None:
    model = slow_model
    asked, other = started(model), started(model)
    key = asked.sender.responses[0].text("stream_key")
    notifier = FeedbackSender()
    strangers = ["", "x", key.upper(), key[:-1] + "g", f"{'0' * 16}:{'0' * 32}", f"{key}\n"]
    assert not any(notifier.abandoned(stranger) for stranger in strangers)
    assert notifier.abandoned(key)
    assert asked.sender.error.code() == 7
    assert notifier.abandoned(key)  # again, for a stream that has ended: harmless
    settle(model)
    assert not other.sender.finals
    model.close()
    assert not notifier.abandoned(key)
    notifier.close()


def test_deadline_ends_with_an_error(model: GeneratorModel) -> None:
    asked = [
        request(1, max_tokens=4000, ignore_eos=True, timeout_ms=1, request_id=name)
        for name in ("", "mine")
    ]
    model.execute(asked)
    # Without the stream's key, which is what cancels it.
    assert asked[0].sender.error.message().startswith("not finished within 0.001 s")
    assert asked[1].sender.error.message().startswith("request 'mine': not finished")


def test_errors_can_travel_as_an_output(slow_model: GeneratorModel) -> None:
    """In the ensemble: an error response would overtake chunks that are still being decoded."""
    for seconds in (0.1, 1, 10):  # until a chunk comes before the deadline
        asked = Request(
            {
                "input_ids": ints(1),
                "stream": np.array([True]),
                "errors_as_output": np.array([True]),
            },
            parameters={"max_tokens": 4000, "ignore_eos": True, "timeout_ms": int(seconds * 1000)},
            request_id="mine",
        )
        slow_model.execute([asked])
        *others, last = asked.sender.wait()
        assert last.error is None
        reason = f"not finished within {seconds} s of arrival"
        assert last.text("error") == f"CANCELLED: request 'mine': {reason}"
        if others:
            break
    assert others
    assert {response.text("error") for response in others} == {""}


def test_a_send_that_fails_ends_that_stream_only(model: GeneratorModel) -> None:
    def fail(response: InferenceResponse | None) -> None:
        if response is not None:
            raise RuntimeError("Failed to send")

    broken, good = request(1), request(2)
    broken.sender.fail = fail
    model.execute([broken, good])
    assert good.sender.wait()[-1].error is None
    assert broken.sender.wait() == []
    assert broken.sender.finals == 1


def test_t13_chunks_are_merged_while_the_detokenizer_is_behind(model: GeneratorModel) -> None:
    """T13: nobody reports progress here, so at most MAX_WAITING chunks go out one by one."""
    inputs = {"stream": np.array([True]), "errors_as_output": np.array([True])}
    asked = [
        Request(
            {"input_ids": ints(i), **inputs}, parameters={"max_tokens": 400, "ignore_eos": True}
        )
        for i in range(1, 5)
    ]
    model.execute(asked)  # type: ignore[arg-type]
    for number, item in enumerate(asked, 1):
        responses = item.sender.wait()
        tokens, text = in_process(model, [number], max_tokens=400, ignore_eos=True)
        assert [t for r in responses for t in r.ids("token_ids")] == tokens
        assert text_of(model, responses) == text
        assert responses[-1].tensors["num_output_tokens"] == [400]
    assert sum(len(item.sender.responses) for item in asked) <= MAX_WAITING + len(asked)
    # With nothing open the count starts anew: the next stream is not held up.
    again = Request({"input_ids": ints(1), **inputs}, parameters={"max_tokens": 50})
    model.execute([again])
    assert len(again.sender.wait()) > 5


def test_t7_nothing_is_kept_after_the_final_response(model: GeneratorModel) -> None:
    """T7: a reference to a sender or request keeps the model from being unloaded."""
    asked = [request(1), request(1, stream=False), request(1, max_tokens=0)]
    references = [weakref.ref(item) for r in asked for item in (r, r.sender)]
    model.execute(asked)
    for item in asked:
        item.sender.wait()
    del asked, item
    settle(model)
    settle(model)
    gc.collect()
    assert [reference() for reference in references] == [None] * 6


def test_close_ends_what_is_open_and_refuses_the_rest(slow_model: GeneratorModel) -> None:
    model = slow_model
    open_stream = request(1, max_tokens=4000, ignore_eos=True)
    model.execute([open_stream])
    model.close()
    assert open_stream.sender.error.code() == 4
    late = request(1)
    model.execute([late])
    assert late.sender.error.code() == 4
    assert late.sender.finals == 1
