"""OpenTelemetry spans of requests, with the SDK's in-memory exporter."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine_support import Recorder, make_engine, request, wait_until
from spans import NOT_SAMPLED, PARENT, SAMPLED, TRACE, Spans, parent_id, span_id, trace_id
from triton_doubles import Request, ints, make_pb_utils, model_args, strings

from pocket_backend.api import ConfigurationError
from pocket_backend.engine.tracing import RequestTracer
from pocket_backend.executors.fake import FakeOptions
from pocket_backend.observability import names, tracing
from pocket_backend.observability.tracing import SpanWriter, span_writer
from pocket_backend.triton import spans as triton_spans
from pocket_backend.triton.detokenizer import DetokenizerModel
from pocket_backend.triton.generator import GeneratorModel
from pocket_backend.triton.spans import DetokenizeSpans, spans_of


def run_traced(
    spans: Spans,
    carrier: Mapping[str, str],
    *,
    options: FakeOptions | None = None,
    prompt: int = 8,
    max_tokens: int = 4,
    **fields: object,
) -> None:
    """One request on an engine with a tracer, to its end and that of its hooks."""
    tracer = RequestTracer(SpanWriter(spans.provider))
    engine, _ = make_engine(options, on_step_end=[tracer.after_step])
    with engine:
        tracer.start("r1", carrier, "mine")
        sink = Recorder()
        engine.submit(
            request("r1", [1 + i % 250 for i in range(prompt)], max_tokens, **fields), sink
        )
        sink.wait()


def test_a_request_is_a_tree_of_spans_in_the_callers_trace() -> None:
    spans = Spans()
    run_traced(spans, SAMPLED, options=FakeOptions(max_batch_tokens=32), prompt=80)
    root = spans.one(names.SPAN_REQUEST)
    queue, prefill = spans.one(names.SPAN_QUEUE), spans.one(names.SPAN_PREFILL)
    decode = spans.one(names.SPAN_DECODE)
    assert parent_id(root) == PARENT
    assert {trace_id(span) for span in spans.finished} == {TRACE}
    assert {parent_id(span) for span in (queue, prefill, decode)} == {span_id(root)}
    ordered = [
        root.start_time,
        queue.start_time,
        queue.end_time,
        prefill.end_time,
        decode.end_time,
        root.end_time,
    ]
    assert ordered == sorted(ordered)
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    chunks = [dict(event.attributes) for event in prefill.events]
    assert [(c["start_position"], c["tokens"]) for c in chunks] == [(0, 32), (32, 32), (64, 16)]
    assert all(
        prefill.start_time <= event.timestamp <= prefill.end_time for event in prefill.events
    )
    assert prefill.attributes["pocketllm.chunks"] == 3
    attributes = root.attributes
    assert attributes["gen_ai.usage.input_tokens"] == 80
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["pocketllm.client_request_id"] == "mine"
    assert root.status.is_unset


def test_without_a_context_a_request_begins_a_trace() -> None:
    spans = Spans()
    run_traced(spans, {"traceparent": "nonsense"})
    assert parent_id(spans.one(names.SPAN_REQUEST)) is None
    assert len(spans.finished) == 4


@pytest.mark.parametrize(("roots", "carrier"), [(True, NOT_SAMPLED), (False, {})])
def test_what_is_not_sampled_is_not_followed(roots: bool, carrier: dict[str, str]) -> None:
    spans = Spans(roots=roots)
    tracer = RequestTracer(SpanWriter(spans.provider))
    tracer.start("r1", carrier)
    assert tracer._open == {}
    run_traced(spans, carrier)
    assert spans.finished == ()


def test_choices_decode_side_by_side() -> None:
    spans = Spans()
    run_traced(spans, SAMPLED, n=3, temperature=1.0, seed=1)
    decodes = spans.named(names.SPAN_DECODE)
    assert sorted(span.attributes["pocketllm.choice"] for span in decodes) == [0, 1, 2]
    assert spans.one(names.SPAN_REQUEST).attributes["gen_ai.usage.output_tokens"] == 12


def test_a_request_that_never_ran_only_queued_and_failed() -> None:
    spans = Spans()
    tracer = RequestTracer(SpanWriter(spans.provider))
    entered, leave = threading.Event(), threading.Event()

    def hold(_requests: object) -> None:
        entered.set()
        assert leave.wait(60)

    engine, executor = make_engine(FakeOptions(max_slots=1), on_step_end=[tracer.after_step])
    with engine:
        executor.faults.before_step = hold
        first, late = Recorder(), Recorder()
        engine.submit(request("first", [1, 2], 3), first)
        assert entered.wait(60)
        tracer.start("late", SAMPLED)
        engine.submit(request("late", [1, 2], 3, deadline_seconds=1e-6), late)
        leave.set()
        late.wait()
    root = spans.one(names.SPAN_REQUEST)
    assert root.status.status_code.name == "ERROR"
    assert root.status.description is None
    assert root.attributes["error.type"] == "DeadlineExceededError"
    assert [span.name for span in spans.finished] == [names.SPAN_QUEUE, names.SPAN_REQUEST]


# --- the models -----------------------------------------------------------------------------------


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """Every model made from now on writes here."""
    made = Spans()
    for module in ("generator", "detokenizer"):
        monkeypatch.setattr(
            f"pocket_backend.triton.{module}.spans_of", lambda _model: SpanWriter(made.provider)
        )
    return made


def test_generator_and_detokenizer_join_the_clients_trace(spans: Spans) -> None:
    pb = make_pb_utils()
    generator = GeneratorModel(pb, model_args(model="fake", drain_seconds="0"))
    detokenizer = DetokenizerModel(pb, model_args(model="fake"))
    asked = Request(
        {"input_ids": ints(5, 6, 7), "stream": np.array([True])},
        parameters={
            "max_tokens": 6,
            "Traceparent": SAMPLED["traceparent"],
        },  # an HTTP header's name
        request_id="client-1",
    )
    generator.execute([asked])
    responses = asked.sender.wait()
    for response in responses:
        wanted = ("token_ids", "context_ids", "text_range", "stream_key", "error")
        inputs = {name: response.tensors[name] for name in wanted}
        [answer] = detokenizer.execute([Request(inputs, parameters=SAMPLED)])
        assert answer.error is None
    generator.close()
    detokenizer.close()
    assert {trace_id(span) for span in spans.finished} == {TRACE}
    root = spans.one(names.SPAN_REQUEST)
    assert root.attributes["pocketllm.client_request_id"] == "client-1"
    assert parent_id(root) == PARENT
    text = spans.one(names.SPAN_DETOKENIZE)
    assert parent_id(text) == PARENT
    assert text.attributes["pocketllm.chunks"] == len(responses)
    assert text.attributes["pocketllm.tokens"] == 6
    assert text.attributes["pocketllm.busy_seconds"] <= (text.end_time - text.start_time) / 1e9
    for span in spans.finished:  # nothing of what was said
        assert not {"prompt", "text", "token_ids"} & set(span.attributes)


def test_a_refused_request_ends_its_span(spans: Spans) -> None:
    generator = GeneratorModel(make_pb_utils(), model_args(model="fake", drain_seconds="0"))
    asked = Request({"input_ids": ints(*[1] * 5000)}, parameters={"max_tokens": 6, **SAMPLED})
    generator.execute([asked])
    assert asked.sender.error.code()
    generator.close()
    assert spans.one(names.SPAN_REQUEST).attributes["error.type"] == "InvalidRequestError"
    assert len(spans.finished) == 1


def test_malformed_chunks_leave_the_detokenizer_as_it_was(spans: Spans) -> None:
    detokenizer = DetokenizerModel(make_pb_utils(), model_args(model="fake"))
    broken = Request({"token_ids": strings(b"\xff")}, parameters=SAMPLED)
    [answer] = detokenizer.execute([broken])
    assert answer.error is not None
    detokenizer.close()
    assert len(spans.finished) <= 1


def test_streams_whose_end_never_came_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_spans, "MAX_OPEN", 2)
    kept = Spans()
    made = DetokenizeSpans(SpanWriter(kept.provider))
    made.chunk("no context", {}, made.begin(), 1, last=False)
    for key in ("a", "b", "c"):
        made.chunk(key, SAMPLED, made.begin(), 1, last=False)
    assert len(kept.finished) == 1
    made.chunk("c", SAMPLED, made.begin(), 2, last=True)
    assert [span.attributes["pocketllm.tokens"] for span in kept.finished] == [1, 3]
    made.chunk("d", NOT_SAMPLED, made.begin(), 1, last=True)
    made.close()
    assert len(kept.finished) == 3


# --- the switch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [{}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_off_is_off(environ: dict[str, str]) -> None:
    assert span_writer("service", environ) is None


def test_off_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it would fail
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    monkeypatch.delenv("POCKETLLM_TRACE_FILE", raising=False)
    assert spans_of("generator") is None
    with pytest.raises(ValueError, match=r"OTEL_TRACES_EXPORTER.*pocketllm\[tracing\]"):
        span_writer("service", {"OTEL_TRACES_EXPORTER": "console"})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OTEL_TRACES_EXPORTER", "carrier-pigeon", "got 'carrier-pigeon'"),
        ("POCKETLLM_TRACE_FILE", "/nowhere/at/all", "No such file"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=message) as caught:
        spans_of("generator")
    assert str(caught.value).startswith(variable)


def test_spans_go_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    path = tmp_path / "spans.jsonl"
    writer = span_writer("pocketllm-test", {"POCKETLLM_TRACE_FILE": str(path)})
    assert writer is not None
    for error in ("", "EngineError"):
        span = writer.start("outer", SAMPLED, 1_000)
        writer.child(span, "inner", 2_000, 3_000, {"count": 1}, [("event", 2_500, {"a": "b"})])
        writer.end(span, 4_000, error)
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["inner", "outer"] * 2
    assert lines[0]["resource"]["attributes"]["service.name"] == "pocketllm-test"
    assert lines[0]["parent_id"] == lines[1]["context"]["span_id"]
    assert lines[1]["parent_id"] == f"0x{PARENT}"
    assert lines[3]["status"]["status_code"] == "ERROR"


def test_a_collector_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.01)
    answered, closed = threading.Event(), threading.Event()
    provider = SimpleNamespace(get_tracer=lambda _name: None, shutdown=lambda: answered.wait(60))
    writer = SpanWriter(provider, closed.set)
    writer.close()
    assert not closed.is_set()
    answered.set()
    assert closed.wait(60)


def test_the_engine_has_no_hook_when_off() -> None:
    assert tracing.span_writer("x", {}) is None
    generator = GeneratorModel(make_pb_utils(), model_args(model="fake", drain_seconds="0"))
    try:
        assert generator._tracer is None
        wait_until(lambda: len(generator._engine._loop._hooks) == 1, "hooks are added")
    finally:
        generator.close()
    detokenizer = DetokenizerModel(make_pb_utils(), model_args(model="fake"))
    assert detokenizer._spans is None
    detokenizer.close()


def test_step_reports_without_open_traces_cost_one_look() -> None:
    tracer = RequestTracer(SpanWriter(Spans().provider))
    tracer.after_step(SimpleNamespace())  # type: ignore[arg-type]  (nothing of it is read)
