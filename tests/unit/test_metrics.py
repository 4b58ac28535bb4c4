"""Histograms, the bridge to Triton's metrics, and the page that documents them."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator

import pytest
from tool_scripts import load_tool
from triton_clients import wait_for
from triton_doubles import Request, ints, make_pb_utils, model_args, strings
from triton_metrics import FakeMetricFamily

from pocket_backend.observability import names
from pocket_backend.observability.histogram import Histogram
from pocket_backend.triton import metrics as bridge
from pocket_backend.triton.generator import GeneratorModel
from pocket_backend.triton.metrics import TritonMetrics
from pocket_backend.triton.tokenizer import TokenizerModel

STEP_SECONDS = 0.001


@pytest.fixture
def family() -> type[FakeMetricFamily]:
    return FakeMetricFamily.fresh()


@pytest.fixture
def model(
    monkeypatch: pytest.MonkeyPatch, family: type[FakeMetricFamily]
) -> Iterator[GeneratorModel]:
    monkeypatch.setenv("POCKETLLM_FAKE_OPTIONS", json.dumps({"delay_seconds": STEP_SECONDS}))
    monkeypatch.setattr(bridge, "PERIOD_SECONDS", 0.1)
    made = GeneratorModel(
        make_pb_utils(MetricFamily=family), model_args(model="fake", drain_seconds="0")
    )
    yield made
    made.close()


def ask(model: GeneratorModel, *ids: int, request_id: str = "", **fields: object) -> Request:
    asked = Request({"input_ids": ints(*ids)}, parameters=fields, request_id=request_id)
    model.execute([asked])
    return asked


def settled(family: type[FakeMetricFamily], key: str, value: float) -> None:
    wait_for(lambda: family.value(key) == value, 20, f"{key} to be {value}")


# --- histograms -----------------------------------------------------------------------------------


def test_histogram_counts_as_prometheus_does() -> None:
    """Against the definition: a bucket holds what is at or below its bound."""
    bounds = (0.5, 1.0, 2.0)
    histogram = Histogram(bounds)
    draw = random.Random(1)
    values = [*bounds, 0.0, 3.0, *(draw.uniform(0, 3) for _ in range(200))]
    for value in values:
        histogram.observe(value)
    data = histogram.data()
    expected = [(f"{b:g}", sum(v <= b for v in values)) for b in bounds]
    assert list(data.cumulative()) == [*expected, ("+Inf", len(values))]
    assert data.count == len(values)
    assert data.sum == pytest.approx(sum(values))


# --- names ----------------------------------------------------------------------------------------


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in names.METRICS}) == len(names.METRICS)
    for metric in names.METRICS:
        assert re.fullmatch(r"pocket_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert len(metric.labels) == len(metric.label_values) or metric is names.ENGINE_INFO


# --- the bridge -----------------------------------------------------------------------------------


def test_every_series_is_there_at_zero(
    model: GeneratorModel, family: type[FakeMetricFamily]
) -> None:
    settled(family, 'pocket_kv_blocks{state="free"}', model._engine.stats().blocks_total)
    for metric in names.METRICS:
        if metric is names.ENGINE_INFO:
            continue
        suffix = "_count" if metric.batched else ""
        for labels in metric.series_labels():
            text = ",".join(f'{key}="{value}"' for key, value in labels.items())
            series = family.series[metric.name + suffix + (f"{{{text}}}" if text else "")]
            gauge = metric in (names.KV_BLOCKS, names.SLOTS_FREE, names.SNAPSHOTS)
            assert gauge or (series.value == 0 and not series.observations), metric.name
    (info,) = [key for key in family.series if key.startswith("pocket_engine_info")]
    assert 'backend="FakeExecutor"' in info
    assert 'model="fake"' in info
    settled(family, info, 1)


def test_counts_and_histograms_agree_with_what_was_asked(
    model: GeneratorModel, family: type[FakeMetricFamily]
) -> None:
    asked = [ask(model, *range(1, 4 + i), max_tokens=1 + i, ignore_eos=True) for i in range(6)]
    for request in asked:
        request.sender.wait()
    generated, prompt = sum(range(1, 7)), sum(range(3, 9))
    settled(family, 'pocket_requests_total{reason="length"}', 6)
    assert family.value('pocket_tokens_total{type="generated"}') == generated
    assert family.value('pocket_tokens_total{type="prompt"}') == prompt
    assert family.value("pocket_prefix_cache_queries_total") == prompt
    assert family.value("pocket_inter_token_latency_seconds_count") == generated - 6
    for name in ("pocket_ttft_seconds", "pocket_request_duration_seconds"):
        assert len(family.series[name].observations) == 6
    tpot = family.series["pocket_request_time_per_output_token_seconds"].observations
    assert len(tpot) == 5, "a request of one token has none"
    assert family.series["pocket_request_generated_tokens"].observations == [1, 2, 3, 4, 5, 6]
    steps = family.value('pocket_steps_total{result="ok"}')
    assert family.value("pocket_batch_size_count") == steps
    assert family.value('pocket_batch_size_bucket{le="+Inf"}') == steps
    assert family.value("pocket_step_seconds_sum") >= STEP_SECONDS * steps


def test_saved_states_are_counted(
    monkeypatch: pytest.MonkeyPatch, family: type[FakeMetricFamily]
) -> None:
    """A prompt of two blocks, again, and others: two places for states in a pool of six blocks."""
    fake = {"recurrent": True, "block_size": 4, "num_blocks": 6, "max_state_snapshots": 2}
    monkeypatch.setenv("POCKETLLM_FAKE_OPTIONS", json.dumps(fake))
    monkeypatch.setattr(bridge, "PERIOD_SECONDS", 0.1)
    made = GeneratorModel(
        make_pb_utils(MetricFamily=family), model_args(model="fake", drain_seconds="0")
    )
    try:
        state_bytes = made._engine.memory_info.state_bytes
        for count, first in enumerate((0, 0, 50, 100), 1):
            ask(made, *range(first + 1, first + 10), max_tokens=1).sender.wait()
            settled(family, 'pocket_requests_total{reason="length"}', count)
        assert family.value("pocket_state_snapshot_hits_total") == 1  # the second
        assert family.value("pocket_state_snapshot_saves_total") == 3  # all others
        assert family.value('pocket_state_snapshots{state="saved"}') == 2
        assert family.value('pocket_state_snapshots{state="free"}') == 0
        assert family.value('pocket_state_snapshots{state="writing"}') == 0
        assert family.value("pocket_state_snapshot_bytes") == 2 * state_bytes > 0
        gone = [family.value(f"pocket_state_snapshot_evictions_total{{reason=\"{reason}\"}}")
                for reason in ("newer", "block")]  # fmt: skip
        assert sum(gone) == 1
    finally:
        made.close()


def test_a_lone_single_step_request_is_written_too(
    model: GeneratorModel, family: type[FakeMetricFamily]
) -> None:
    """Nothing comes after it that would cause a write."""
    for count in (1, 2):
        ask(model, 1, 2, max_tokens=1).sender.wait()
        settled(family, 'pocket_tokens_total{type="generated"}', count)
        settled(family, "pocket_requests_running", 0)


def test_cancelled_failed_and_refused_are_told_apart(
    model: GeneratorModel, family: type[FakeMetricFamily]
) -> None:
    asked = ask(model, 1, request_id="mine", max_tokens=4000, ignore_eos=True)
    gone = ask(model, 2, max_tokens=4000, ignore_eos=True)
    late = ask(model, 3, max_tokens=4000, ignore_eos=True, timeout_ms=50)
    gone.sender.gone = True
    model.execute([Request({"control": strings('{"cancel_request_id": "mine"}')})])
    ask(model, 4, max_tokens=0)
    ask(model, 5, beam_width=2)
    for request in (asked, gone, late):
        request.sender.wait()
    settled(family, 'pocket_requests_cancelled_total{reason="asked"}', 1)
    settled(family, 'pocket_requests_cancelled_total{reason="disconnected"}', 1)
    settled(family, 'pocket_requests_failed_total{reason="deadline"}', 1)
    settled(family, 'pocket_requests_refused_total{reason="invalid"}', 1)
    settled(family, 'pocket_requests_refused_total{reason="unsupported"}', 1)
    settled(family, 'pocket_requests_total{reason="cancelled"}', 2)
    settled(family, 'pocket_requests_total{reason="error"}', 1)
    assert family.series["pocket_ttft_seconds"].observations == []


def test_the_tokenizer_counts_what_it_refuses(
    monkeypatch: pytest.MonkeyPatch, family: type[FakeMetricFamily]
) -> None:
    model = TokenizerModel(make_pb_utils(MetricFamily=family), model_args(model="fake"))
    bad = Request({"text_input": strings("hello"), "max_tokens": ints(0)})
    good = Request({"text_input": strings("hello")})
    answers = model.execute([bad, good])
    assert [answer.error is None for answer in answers] == [False, True]
    assert family.value('pocket_requests_refused_total{reason="invalid"}') == 1


def test_metrics_switched_off_cost_nothing_and_harm_nothing() -> None:
    class Refusing:
        COUNTER = GAUGE = HISTOGRAM = ""

        def __init__(self, **_: object) -> None:
            raise RuntimeError("metrics are disabled")

    for pb_utils in (make_pb_utils(), make_pb_utils(MetricFamily=Refusing)):
        metrics = TritonMetrics(pb_utils, names.METRICS)
        metrics.add(names.STALLS, 1)
        metrics.set(names.RUNNING, 3)
        metrics.observe(names.TTFT_SECONDS, 0.1)
        metrics.set_info(names.ENGINE_INFO, "1", "b", "m")
        metrics.write_histogram(names.STEP_SECONDS, Histogram(names.STEP_SECONDS.buckets).data())


def test_writes_do_not_grow_with_tokens(
    model: GeneratorModel, family: type[FakeMetricFamily]
) -> None:
    """What comes within a period is written together: far fewer writes than tokens."""
    started = time.monotonic()
    ask(model, 1, max_tokens=1000, ignore_eos=True).sender.wait()
    settled(family, 'pocket_tokens_total{type="generated"}', 1000)
    bucket = family.series['pocket_inter_token_latency_seconds_bucket{le="+Inf"}']
    assert bucket.value == 999
    assert bucket.writes <= (time.monotonic() - started) / bridge.PERIOD_SECONDS + 1


# --- the page -------------------------------------------------------------------------------------


def test_the_page_is_current() -> None:
    tool = load_tool("write_metrics_reference")
    page = tool.PAGE.read_text(encoding="utf-8")
    assert tool.render(page) == page, "run: python tools/write_metrics_reference.py"
    assert all(f"`{metric.name}`" in page for metric in names.METRICS)
