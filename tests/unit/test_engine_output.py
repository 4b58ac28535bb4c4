"""The output stage: text rule, stop strings, the token-only mode."""

from __future__ import annotations

import pytest
from engine_support import Recorder, alone, make_stepper, request

from pocket_backend.api import TokenEvent
from pocket_backend.core.step import TokenLogprobs
from pocket_backend.engine.output import RequestOutput, RequestTimes
from pocket_backend.executors.fake import FakeOptions
from pocket_backend.executors.fake_tokenizer import FakeTokenizer
from pocket_backend.text.incremental import chunk_text

BYTES = FakeTokenizer().token_bytes


def feed(data: bytes, **params: object) -> tuple[list[TokenEvent], TokenEvent]:
    asked = request("r", (1,), None, **params)
    output = RequestOutput(asked, 0.0, BYTES)
    events = []
    pending = None
    for value in data:
        event = output.push(value, 0.0)
        if output.stop_string is not None:
            pending = event
            break
        if event is not None:
            events.append(event)
    reason = "stop" if output.stop_string else "length"
    return events, output.finish(reason, 1.0, stop_reason=output.stop_string, pending=pending)


def text_of(events: list[TokenEvent], last: TokenEvent) -> str:
    return "".join(event.text for event in [*events, last])


@pytest.mark.parametrize(
    "data",
    [
        b"plain",
        "😀 smile é".encode(),
        b"\xf0\x9f",
        b"\x80abc",
        b"\xc0\x80\xed\xa0\x80x",
        b"a\xf0\x9f\x98",
    ],
)
def test_text_rule(data: bytes) -> None:
    events, last = feed(data)
    assert text_of(events, last) == data.decode("utf-8", "replace")
    assert tuple(t for e in [*events, last] for t in e.token_ids) == tuple(data)
    for event in [*events, last]:
        again = chunk_text(event.context_ids, event.token_ids, event.text_range, BYTES)
        assert again == event.text
    assert all(event.text for event in events), "an empty delta was sent"


def test_stop_string_is_cut_and_never_leaks() -> None:
    events, last = feed(b"one two STOP three", stop=["STOP"])
    assert text_of(events, last) == "one two "
    assert last.stop_reason == "STOP"
    events, last = feed(b"one two STOP three", stop=["STOP"], include_stop_str_in_output=True)
    assert text_of(events, last) == "one two STOP"


def test_held_back_text_is_released_when_it_cannot_become_a_stop() -> None:
    events, last = feed(b"STO", stop=["STOP"])
    assert events == []
    assert last.text == "STO"
    events, _ = feed(b"STOx", stop=["STOP"])
    assert [event.text for event in events] == ["STOx"]


def test_min_tokens_postpones_stop_strings() -> None:
    events, last = feed(b"a.b.c.d", stop=["."], min_tokens=4)
    assert text_of(events, last) == "a.b"


def test_last_event_merges_the_pending_one() -> None:
    output = RequestOutput(request("r", (1,), 2), 0.0, BYTES)
    assert output.push(ord("a"), 0.0) is not None
    pending = output.push(ord("b"), 0.0)
    last = output.finish("length", 1.0, pending=pending)
    assert (last.text, last.token_ids, last.last) == ("b", (ord("b"),), True)
    assert chunk_text(last.context_ids, last.token_ids, last.text_range, BYTES) == "b"


def test_without_a_tokenizer_every_token_is_an_event() -> None:
    output = RequestOutput(request("r", (1,), 2), 0.0, None)
    event = output.push(300, 0.0)
    assert event is not None
    assert (event.token_ids, event.text) == ((300,), "")
    last = output.finish("length", 1.0)
    assert (last.token_ids, last.text) == ((), "")


def test_logprobs_stay_with_their_tokens() -> None:
    asked = request("r", (1,), 8, logprobs=1)
    output = RequestOutput(asked, 0.0, BYTES)
    events = [
        output.push(value, 0.0, TokenLogprobs(-float(index), {value: -float(index)}))
        for index, value in enumerate("aé😀".encode())
    ]
    last = output.finish("length", 1.0)
    found = [event for event in [*events, last] if event is not None]
    for event in found:
        assert [item.token_id for item in event.logprobs] == list(event.token_ids)
    values = [item.logprob for event in found for item in event.logprobs]
    assert values == [-float(i) for i in range(len("aé😀".encode()))]


def test_timings_of_a_request_that_never_ran() -> None:
    times = RequestTimes(arrival=10.0, finished=13.0)
    metrics = times.metrics(0)
    assert metrics.queue_seconds == pytest.approx(3.0)
    assert metrics.total_seconds == pytest.approx(3.0)
    assert metrics.ttft_seconds == metrics.tpot_seconds == metrics.prefill_seconds == 0.0


def test_stop_string_ends_the_sequence_in_the_same_step() -> None:
    options = FakeOptions(vocab_size=128)
    full = alone(request("x", b"abc", 30), options, text=True).results()[0]
    stop = full.text[4:7]
    first = full.text.find(stop)
    stepper, executor = make_stepper(options, text=True)
    sink = Recorder()
    stepper.add(stepper.entry(request("a", b"abc", 30, stop=[stop]), sink))
    while stepper.step(lambda: None):
        pass
    last = sink.wait()
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert sink.text == full.text[:first]
    assert last.usage is not None
    assert last.usage.completion_tokens == len(sink.token_ids) == executor.steps
    assert not executor.occupied_slots


def test_stop_string_at_the_length_limit_counts_as_stop() -> None:
    options = FakeOptions(vocab_size=128)
    full = alone(request("x", b"abc", 6), options, text=True).results()[0]
    asked = request("a", b"abc", 6, stop=[full.text[-1]])
    assert full.text[-1] not in full.text[:-1], "choose another prompt"
    cut = alone(asked, options, text=True).results()[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", full.text[-1])


def test_special_end_token_has_no_text_unless_asked() -> None:
    options = FakeOptions(eos_probability=1.0)
    hidden = alone(request("x", b"abc"), options, text=True).results()[0]
    shown = alone(request("x", b"abc", skip_special_tokens=False), options, text=True).results()[0]
    assert hidden.text == ""
    assert shown.text == "<eos>"
    assert hidden.token_ids == shown.token_ids == (0,)
