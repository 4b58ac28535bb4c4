"""Watchdog, health and logs."""

from __future__ import annotations

import io
import json
import logging

import pytest
from engine_support import Gate, ManualClock, Recorder, make_engine, request, wait_until

from pocket_backend.observability.health import HealthStatus, Watchdog
from pocket_backend.observability.logging import (
    ROOT,
    configure_logging,
    get_logger,
    log_event,
    prompts_are_logged,
    reset_logging,
)
from pocket_backend.observability.names import METRICS


@pytest.fixture
def log_lines():
    """JSON lines logged by the package, parsed when read."""
    stream = io.StringIO()
    configure_logging("DEBUG", "json", stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_t2_watchdog_reports_a_stall_once() -> None:
    watchdog = Watchdog(stall_seconds=10.0, last_progress=100.0)
    assert not watchdog.observe(105.0, work_waiting=True)
    assert not watchdog.observe(200.0, work_waiting=False)
    watchdog.progress(200.0)
    assert watchdog.observe(211.0, work_waiting=True)
    assert watchdog.stalled
    assert not watchdog.observe(212.0, work_waiting=True)
    assert watchdog.progress(213.0)
    assert not watchdog.stalled
    assert not watchdog.progress(214.0)


def test_health_of_a_healthy_engine() -> None:
    engine, _ = make_engine()
    with engine:
        health = engine.health()
        assert (health.status, health.alive, health.ready) == ("ok", True, True)
        assert health.backend == "FakeExecutor"
        assert json.loads(json.dumps(health.as_dict()))["details"]["open_requests"] == 0
    stopped = engine.health()
    assert (stopped.status, stopped.alive, stopped.ready) == ("stopped", False, False)


def test_t2_a_hanging_step_turns_health_to_stalled_and_back(log_lines) -> None:
    clock = ManualClock()
    gate = Gate()
    engine, executor = make_engine(clock=clock, stall_seconds=0.2)
    executor.faults.before_step = gate
    with engine:
        sink = Recorder()
        engine.submit(request("a", (1, 2), 3), sink)
        gate.wait_until_inside()
        clock.now += 1.0
        # Logged by the watchdog thread: nobody asks for health here.
        wait_until(
            lambda: any(line["event"] == "work waiting, no progress" for line in log_lines())
        )
        health = engine.health()
        assert (health.status, health.alive, health.ready) == ("stalled", True, False)
        assert "1 requests wait" in health.message
        gate.open.set()
        sink.wait()
        wait_until(lambda: engine.health().status == "ok")
        assert engine.health().message == ""
        wait_until(lambda: engine.stats().stalls == 1)
    stalls = [line for line in log_lines() if line["event"] == "work waiting, no progress"]
    assert len(stalls) == 1
    assert stalls[0]["executing"] is True
    assert stalls[0]["open_requests"] == 1


def test_an_idle_engine_never_stalls() -> None:
    engine, _ = make_engine(stall_seconds=0.01)
    with engine:
        list(engine.generate([1, 2], 2))
        wait_until(lambda: engine.health().details["seconds_since_progress"] > 0.05)
        assert engine.health().status == "ok"


def test_one_line_per_finished_request_and_no_prompt(log_lines) -> None:
    engine, executor = make_engine(text=True)
    executor.faults.failing_requests.add("bad")
    secret = b"my secret prompt"
    with engine:
        for name in ("good", "bad"):
            sink = Recorder()
            engine.submit(request(name, secret, 3), sink)
            sink.wait()
    lines = [line for line in log_lines() if line["event"] == "request finished"]
    assert [line["request_id"] for line in lines] == ["good", "bad"]
    good, bad = lines
    assert (good["reason"], good["level"]) == ("length", "info")
    assert (good["prompt_tokens"], good["completion_tokens"]) == (len(secret), 3)
    assert good["ttft_seconds"] >= 0
    assert (bad["reason"], bad["level"], bad["error"]) == ("error", "warning", "told to fail")
    assert "secret" not in json.dumps(log_lines())


def test_prompts_are_logged_only_when_asked(log_lines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(text=True)
    monkeypatch.setattr("pocket_backend.observability.logging._log_prompts", True)
    with engine:
        list(engine.generate([9, 8, 7], 1))
    (line,) = [line for line in log_lines() if line["event"] == "request finished"]
    assert line["prompt_token_ids"] == "[9, 8, 7]"


def test_log_fields_are_bounded_and_redacted(log_lines) -> None:
    log_event(
        get_logger("test"), logging.INFO, "event", prompt="secret", request_id="x" * 9999, note=None
    )
    [line] = log_lines()
    assert line["prompt"] == "[redacted]"
    assert len(line["request_id"]) < 600
    assert "note" not in line


def test_key_value_format_keeps_one_line_per_event() -> None:
    stream = io.StringIO()
    configure_logging("INFO", "text", stream)
    log_event(get_logger("test"), logging.INFO, "two words", a="x\ny", b=1.5, c="plain")
    log_event(get_logger("test"), logging.DEBUG, "not kept")
    [line] = stream.getvalue().splitlines()
    assert line.endswith('INFO pocketllm.test two words a="x\\ny" b=1.5 c=plain')


def test_a_reset_gives_the_log_back(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    configure_logging("INFO", "text", stream, prompts=True)
    reset_logging()
    with caplog.at_level(logging.INFO, ROOT):
        log_event(get_logger("test"), logging.INFO, "heard once")
    assert stream.getvalue() == ""
    assert [record.getMessage() for record in caplog.records] == ["heard once"]
    assert not prompts_are_logged()


def test_metric_names_follow_the_rules() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("pocket_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help


def test_health_status_is_plain_data() -> None:
    status = HealthStatus("ok", "x", ready=True, alive=True)
    assert status.as_dict()["details"] == {}


def test_work_after_a_long_idle_time_is_not_a_stall() -> None:
    clock = ManualClock()
    gate = Gate()
    engine, executor = make_engine(clock=clock, stall_seconds=10.0)
    executor.faults.before_step = gate
    with engine:
        clock.now += 1000.0
        sink = Recorder()
        engine.submit(request("a", (1, 2), 3), sink)
        gate.wait_until_inside()
        assert engine.health().status == "ok"
        clock.now += 11.0
        assert engine.health().status == "stalled"
        gate.open.set()
        sink.wait()
