"""Judgement, restarts and the lifeline without a Triton server; time is passed in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from triton_clients import wait_for

from pocket_backend.api import ConfigurationError, EngineArgs, EngineError
from pocket_backend.api.types import GenerationRequest
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.triton import supervisor as supervision
from pocket_backend.triton.lifeline import EngineStatus, Lifeline, LifelineListener
from pocket_backend.triton.liveness import (
    Canary,
    LivenessPolicy,
    Sample,
    Watch,
    find_processes,
    sample_process,
)
from pocket_backend.triton.supervisor import RestartPolicy, SupervisionPolicy, Supervisor

POLICY = LivenessPolicy(stall_seconds=4.0, busy_stall_seconds=20.0, stopped_seconds=1.0)


def judge(steps: list[tuple[float, str, float, float]]) -> list[str | None]:
    """Verdicts for samples of (time, state, CPU seconds, waiting seconds)."""
    watch = Watch(1, POLICY)
    return [watch.observe(now, Sample(state, cpu), wait) for now, state, cpu, wait in steps]


# --- judgement ------------------------------------------------------------------------------------


def test_waiting_for_an_idle_process_is_a_hang() -> None:
    verdicts = judge([(i * 0.5, "S", 1.0, i * 0.5) for i in range(10)])
    assert verdicts[:8] == [None] * 8
    assert str(verdicts[8]).startswith("hangs: no progress for 4.0 s")


def test_a_long_step_computes_and_is_left_alone_until_the_second_limit() -> None:
    verdicts = judge([(float(i), "R", float(i), float(i)) for i in range(21)])
    assert verdicts[:20] == [None] * 20
    assert str(verdicts[20]).startswith("stuck")


def judge_queueing(queued: list[bool]) -> list[str | None]:
    """Verdicts for a process that gets no CPU; ``queued``: whether a thread waits for one."""
    watch = Watch(1, POLICY)
    return [
        watch.observe(i * 0.5, Sample("S", 1.0, queued=wants), i * 0.5)
        for i, wants in enumerate(queued)
    ]


def test_m5_a_process_that_waits_for_a_processor_does_not_hang() -> None:
    """M5: others have all CPUs; a restart would have to wait for one as well."""
    verdicts = judge_queueing([True] * 41)
    assert verdicts[:40] == [None] * 40
    assert str(verdicts[40]).startswith("stuck")


def test_a_hang_is_found_although_a_thread_is_sometimes_about_to_run() -> None:
    """A pool's timer, or the thread that answers the supervisor."""
    verdicts = judge_queueing([i % 3 == 0 for i in range(10)])
    assert str(verdicts[8]).startswith("hangs")


def test_answering_the_supervisor_is_no_progress() -> None:
    """0.2 ms of CPU per question do not pass for computing."""
    verdicts = judge([(i * 0.5, "S", i * 0.0002, i * 0.5) for i in range(10)])
    assert verdicts[-1] is not None


def test_idle_without_work_is_fine() -> None:
    assert judge([(i * 10.0, "S", 1.0, 0.0) for i in range(10)]) == [None] * 10


def test_a_process_that_slept_before_the_work_came_gets_its_time() -> None:
    steps = [(i * 0.5, "S", 1.0, 0.0) for i in range(20)]
    steps += [(10 + i * 0.5, "S", 1.0, i * 0.5) for i in range(8)]
    assert judge(steps) == [None] * 28


def test_zombie_twice_and_stopped_for_a_second() -> None:
    assert judge([(0, "Z", 0, 0), (0.5, "Z", 0, 0)]) == [None, "died"]
    assert judge([(0, "T", 0, 0), (0.5, "T", 0, 0), (1, "T", 0, 0)]) == [
        None, None, "stopped by a signal",
    ]  # fmt: skip
    assert judge([(0, "T", 0, 0), (0.5, "S", 0, 0), (1, "T", 0, 0)]) == [None] * 3


def test_samples_of_real_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wait_for(lambda: cpu(child.pid) > 0.05, 30, "it used CPU")
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: state(child.pid) == "T", 20, "stopped")
        os.kill(child.pid, signal.SIGKILL)
        wait_for(lambda: state(child.pid) == "Z", 20, "zombie")
    finally:
        child.kill()
        child.wait()
    assert sample_process(child.pid) is None


def test_a_thread_that_wants_a_processor_is_seen() -> None:
    """In any thread: the main one of a stub sleeps while others compute."""
    code = (
        "import sys, threading, time\n"
        "threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()\n"
        "threading.Event().wait()\n"
    )
    busy = subprocess.Popen([sys.executable, "-c", code])
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        wait_for(lambda: cpu(busy.pid) > 0.05, 30, "it used CPU")
        wait_for(lambda: state(busy.pid) == "S", 20, "its main thread sleeps")
        wait_for(lambda: sample_process(busy.pid, threads=True).queued, 20, "it wants more")  # type: ignore[union-attr]
        wait_for(lambda: state(idle.pid) == "S", 20, "the other one sleeps")
        for pid, threads in ((idle.pid, True), (busy.pid, False)):
            sample = sample_process(pid, threads=threads)
            assert sample is not None
            assert not sample.queued
    finally:
        for child in (busy, idle):
            child.kill()
            child.wait()


def cpu(pid: int) -> float:
    sample = sample_process(pid)
    assert sample is not None
    return sample.cpu_seconds


def state(pid: int) -> str:
    sample = sample_process(pid)
    assert sample is not None
    return sample.state


def test_processes_are_found_by_the_server_id_only() -> None:
    code = "import time; time.sleep(60)"
    mine = ["--x=pocketllm-0123456789ab-", "pocketllm-0123456789ac-region"]
    children = [subprocess.Popen([sys.executable, "-c", code, word]) for word in mine]
    try:
        wait_for(lambda: find_processes("0123456789ab") != {}, 20, "found")
        assert find_processes("0123456789ab") == {"tritonserver": children[0].pid}
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_canary_counts_failures_in_a_row_and_knows_how_long_it_waits() -> None:
    errors: list[OSError | None] = [OSError("a"), OSError("b"), None, OSError("c")]
    hold = threading.Event()
    seen: list[int] = []

    def ask() -> None:
        seen.append(canary.failures)
        if not errors:
            assert hold.wait(60)
            return
        error = errors.pop(0)
        if error is not None:
            raise error

    canary: Canary = Canary("x", ask, 0.01)
    wait_for(lambda: canary.waiting_seconds(time.monotonic()) > 0.05, 20, "it waits")
    assert seen == [0, 1, 2, 0, 1]
    assert canary.last_error == "c"
    canary.close()
    hold.set()
    wait_for(lambda: canary.waiting_seconds(time.monotonic()) == 0, 20, "answered")


# --- lifeline -------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[UnifiedEngine]:
    args = EngineArgs(model="fake", backend="fake", backend_options={"delay_seconds": 0.01})
    with UnifiedEngine.from_args(args) as running:
        yield running


def test_lifeline_tells_progress_and_drains(engine: UnifiedEngine, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)  # longer than an address of a Unix socket may be
    deep.mkdir()
    listener = LifelineListener.from_environment(
        engine, {"POCKETLLM_LIFELINE": str(deep / "lifeline")}
    )
    assert listener is not None
    lifeline = Lifeline(deep / "lifeline")
    idle = lifeline.status(20)
    assert (idle.state, idle.open_requests, idle.waiting_seconds) == ("ok", 0, 0.0)
    stream = engine.stream(GenerationRequest(request_id="a", prompt_tokens=(1, 2)))
    wait_for(lambda: lifeline.status(20).steps > idle.steps + 2, 20, "steps advance")
    assert lifeline.status(20).open_requests == 1
    assert lifeline.drain(0.05, 20).state == "draining"
    wait_for(lambda: lifeline.status(20).open_requests == 0, 20, "ended")
    assert any("shutting down" in str(event.error) for event in stream)
    listener.close()
    listener.close()
    with pytest.raises(OSError, match=r".+"):
        lifeline.status(1)


def test_a_newer_generator_takes_the_lifeline_over(engine: UnifiedEngine, tmp_path: Path) -> None:
    """While a model is reloaded, the old one closes after the new one began."""
    old = LifelineListener(engine, tmp_path / "lifeline")
    new = LifelineListener(engine, tmp_path / "lifeline")
    old.close()
    assert Lifeline(tmp_path / "lifeline").status(20).state == "ok"
    new.close()


def test_garbage_on_the_lifeline_is_survived(engine: UnifiedEngine, tmp_path: Path) -> None:
    import socket

    listener = LifelineListener(engine, tmp_path / "lifeline")
    for junk in (b"", b"\xff", b"[]", b'{"drain_seconds": "x"}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(str(tmp_path / "lifeline"))
            if junk:
                connection.send(junk)
    assert Lifeline(tmp_path / "lifeline").status(20).state == "ok"
    listener.close()


def test_no_lifeline_without_a_launcher(engine: UnifiedEngine) -> None:
    assert LifelineListener.from_environment(engine, {}) is None


def test_waiting_seconds_need_work() -> None:
    assert EngineStatus("ok", 0, 7, 99.0).waiting_seconds == 0.0
    assert EngineStatus("ok", 1, 7, 99.0).waiting_seconds == 99.0


# --- restarts -------------------------------------------------------------------------------------


def test_delays_double_up_to_the_cap_and_end() -> None:
    policy = RestartPolicy(max_restarts=7, first_delay=1.0, max_delay=10.0)
    delays = [policy.delay(n) for n in range(8)]
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, None]
    assert RestartPolicy(max_restarts=0).delay(0) is None


def test_policies_name_what_is_wrong() -> None:
    with pytest.raises(ConfigurationError, match="max_restarts: got -1"):
        RestartPolicy(max_restarts=-1)
    with pytest.raises(ConfigurationError, match="drain_seconds: got -2"):
        SupervisionPolicy(drain_seconds=-2)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class FakeServer:
    """Serves for ``lives`` seconds after each start, then is in trouble."""

    def __init__(self, clock: Clock, lives: list[float], start_errors: int = 0) -> None:
        self.clock, self.lives, self.start_errors = clock, lives, start_errors
        self.calls: list[str] = []

    def stop(self, timeout: float) -> None:
        self.calls.append(f"stop {timeout:g}")

    def start(self) -> None:
        self.calls.append("start")
        if self.start_errors:
            self.start_errors -= 1
            raise ConfigurationError("port taken")

    def failure_lines(self) -> str:
        return "E1129 something"


def run_supervisor(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, clock: Clock, policy: RestartPolicy
) -> str:
    class Watcher:
        def __init__(self, *_: object) -> None:
            self.ends = clock.now + (server.lives.pop(0) if server.lives else 0.0)

        def look(self) -> str | None:
            return "the generator died" if clock.now >= self.ends else None

        def close(self) -> None:
            pass

    monkeypatch.setattr(supervision, "_Watcher", Watcher)
    made = Supervisor(
        server,  # type: ignore[arg-type]
        SupervisionPolicy(restarts=policy),
        clock=clock,
        sleep=clock.sleep,
    )
    with pytest.raises(EngineError) as caught:
        made.run()
    return str(caught.value)


def test_crash_loop_backs_off_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    server = FakeServer(clock, [])
    events: list[str] = []
    monkeypatch.setattr(
        supervision, "log_event", lambda _logger, _level, event, **_fields: events.append(event)
    )
    text = run_supervisor(monkeypatch, server, clock, RestartPolicy(max_restarts=4))
    assert text.startswith("gave up after 4 restarts in a row: the generator died; its log says:")
    assert server.calls == ["stop 0", "start"] * 4
    assert [s for s in clock.slept if s != 0.5] == [0.0, 1.0, 2.0, 4.0]
    assert events.count("restarting") == events.count("service restored") == 4
    assert events[-1] == "giving up"


def test_stable_service_ends_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    server = FakeServer(clock, [100.0, 100.0, 100.0, 1.0, 1.0, 1.0])
    run_supervisor(monkeypatch, server, clock, RestartPolicy(max_restarts=2, stable_seconds=30.0))
    assert server.calls.count("start") == 4


def test_failed_restarts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    server = FakeServer(clock, [], start_errors=99)
    text = run_supervisor(monkeypatch, server, clock, RestartPolicy(max_restarts=3))
    assert "gave up after 3 restarts in a row: restart failed: port taken" in text
    assert server.calls.count("start") == 3


def test_no_restart_when_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    server = FakeServer(clock, [])
    text = run_supervisor(monkeypatch, server, clock, RestartPolicy(max_restarts=0))
    assert text == "the generator died; its log says:\nE1129 something"
    assert server.calls == []


class DrainingServer:
    """Its engine has ``open`` requests and loses them when ``ends`` says so."""

    running = True
    http_url = "http://127.0.0.1:1"
    admin_key = "k"

    def __init__(self, clock: Clock, open_until: Callable[[float, float], bool]) -> None:
        self.clock, self.open_until = clock, open_until
        self.drained = 0.0
        self.lifeline = SimpleNamespace(status=self._status, drain=self._drain)

    def _drain(self, seconds: float, _timeout: float) -> EngineStatus:
        self.drained = seconds
        return self._status(0)

    def _status(self, _timeout: float) -> EngineStatus:
        return EngineStatus("draining", int(self.open_until(self.clock.now, self.drained)), 1, 0.0)


@pytest.mark.parametrize(
    ("finished_at", "takes"), [(2.0, (2.0, 2.2)), (1e9, (5.0, 5.2)), (-1.0, (0.0, 0.1))]
)
def test_drain_ends_with_the_last_request_or_at_its_limit(
    finished_at: float, takes: tuple[float, float]
) -> None:
    clock = Clock()
    server = DrainingServer(clock, lambda now, limit: now < min(finished_at, limit))
    policy = SupervisionPolicy(drain_seconds=5.0)
    made = Supervisor(server, policy, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    made.drain()
    assert takes[0] <= clock.now <= takes[1]
    assert server.drained == 5.0


def test_drain_of_a_wedged_generator_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never lets go of its request: the drain ends some seconds after its limit all the same."""
    clock = Clock()
    server = DrainingServer(clock, lambda _now, _limit: True)
    made = Supervisor(server, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    made.drain(1.0)
    assert 4.0 <= clock.now < 4.2
