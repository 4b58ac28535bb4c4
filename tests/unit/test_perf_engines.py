"""The worker protocol with an engine without a model, and our own adapter on the fake backend."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perf import compare
from perf.bars import OURS
from perf.engines import environments
from perf.engines.base import BatchResult, EngineFailure, EngineOptions, RequestTimes, check_result
from perf.engines.dummy_worker import DummyEngine
from perf.engines.environments import Peer, requirements_stamp
from perf.engines.pocketllm import PocketLLMEngine
from perf.engines.subprocess_engine import SubprocessEngine
from perf.engines.worker import decode_result, encode_result, serve
from perf.records import read_records

_FAKE = EngineOptions(model="fake", extra={"backend": "fake"})


@pytest.fixture
def dummy(tmp_path: Path) -> Iterator[SubprocessEngine]:
    module = "perf.engines.dummy_worker"
    engine = SubprocessEngine("dummy", sys.executable, module, log=tmp_path / "dummy.log")
    yield engine
    engine.close()


def _options(fail: str | None = None) -> EngineOptions:
    return EngineOptions(model="none", extra={"fail": fail} if fail else {})


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _wait_for_state(pid: int, stopped: bool) -> bool:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if (_state(pid) == "T") == stopped:
            return True
        time.sleep(0.005)
    return False


def test_a_worker_starts_runs_and_ends(dummy: SubprocessEngine) -> None:
    info = dummy.start(_options())
    assert info == {"version": "1", "threads": 2}
    result = dummy.run([(1, 2, 3), (10,)], 3)
    assert [request.token_ids for request in result.requests] == [(4, 5, 6), (11, 12, 13)]
    assert result.generated_tokens == 6
    assert dummy.memory() > 1_000_000
    pid = dummy.pid
    dummy.close()
    assert not Path(f"/proc/{pid}").exists()
    dummy.close()


def test_noise_on_standard_output_goes_to_the_log(dummy: SubprocessEngine, tmp_path: Path) -> None:
    dummy.start(_options())
    dummy.run([(1,)], 1)
    dummy.close()
    assert "noise" in (tmp_path / "dummy.log").read_text()


def test_pause_stops_the_process_and_the_next_call_resumes_it(dummy: SubprocessEngine) -> None:
    dummy.start(_options())
    dummy.pause()
    assert _wait_for_state(dummy.pid, stopped=True)
    assert dummy.run([(5,)], 1).requests[0].token_ids == (6,)
    assert _wait_for_state(dummy.pid, stopped=False)
    dummy.pause()


def test_a_paused_worker_can_be_closed(dummy: SubprocessEngine) -> None:
    dummy.start(_options())
    pid = dummy.pid
    dummy.pause()
    dummy.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_failed_start_is_reported_and_leaves_no_process(dummy: SubprocessEngine) -> None:
    with pytest.raises(EngineFailure, match="ValueError: asked to fail"):
        dummy.start(_options("start"))
    with pytest.raises(EngineFailure, match="not started"):
        _ = dummy.pid


def test_a_failed_run_is_reported_and_the_worker_goes_on(dummy: SubprocessEngine) -> None:
    dummy.start(_options("run"))
    with pytest.raises(EngineFailure, match="ValueError: asked to fail"):
        dummy.run([(1,)], 1)
    assert dummy.memory() > 0


def test_starting_twice_is_refused(dummy: SubprocessEngine) -> None:
    dummy.start(_options())
    with pytest.raises(EngineFailure, match="started already"):
        dummy.start(_options())
    assert dummy.run([(1,)], 1).generated_tokens == 1


def test_a_worker_that_dies_is_noticed(dummy: SubprocessEngine) -> None:
    dummy.start(_options("exit"))
    with pytest.raises(EngineFailure, match="the worker ended"):
        dummy.run([(1,)], 1)


def test_a_killed_worker_is_noticed(dummy: SubprocessEngine) -> None:
    dummy.start(_options())
    os.kill(dummy.pid, signal.SIGKILL)
    with pytest.raises(EngineFailure, match="the worker ended"):
        dummy.run([(1,)], 1)


def test_missing_tokens_are_refused(dummy: SubprocessEngine) -> None:
    dummy.start(_options("short"))
    with pytest.raises(EngineFailure, match="asked for 2 x 4 tokens"):
        dummy.run([(1,), (2,)], 4)


def test_calls_before_start_are_refused(dummy: SubprocessEngine) -> None:
    with pytest.raises(EngineFailure, match="not started"):
        dummy.run([(1,)], 1)


def test_caller_settings_do_not_reach_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "x")
    engine = SubprocessEngine(
        "dummy",
        sys.executable,
        "perf.engines.dummy_worker",
        log=tmp_path / "log",
        environment={"OMP_WAIT_POLICY": "passive"},
    )
    try:
        engine.start(_options())
        variables = Path(f"/proc/{engine.pid}/environ").read_bytes().split(b"\0")
    finally:
        engine.close()
    names = {variable.split(b"=")[0] for variable in variables}
    assert not names & {b"OMP_NUM_THREADS", b"OPENBLAS_CORETYPE"}
    assert b"OMP_WAIT_POLICY=passive" in variables


def test_results_survive_the_wire() -> None:
    result = BatchResult((RequestTimes((1, 2), 0.5, 0.25), RequestTimes((), 1.0)), 1.0, {"x": 2.5})
    assert decode_result(json.loads(json.dumps(encode_result(result)))) == result


def test_serving_ends_with_the_input_and_refuses_unknown_operations() -> None:
    answers = io.StringIO()
    serve(DummyEngine(), io.StringIO('{"op": "jump"}\n'), answers)
    assert json.loads(answers.getvalue()) == {
        "ok": False,
        "error": "ValueError: unknown operation 'jump'",
    }


def test_check_result_wants_every_request() -> None:
    result = BatchResult((RequestTimes((1,), 1.0),), 1.0)
    assert check_result("x", result, 1, 1) is result
    with pytest.raises(EngineFailure):
        check_result("x", result, 2, 1)


def test_our_adapter_returns_tokens_and_times() -> None:
    engine = PocketLLMEngine()
    try:
        info = engine.start(_FAKE)
        assert info["backend"] == "fake"
        prompts = [tuple(range(1, 40)), tuple(range(2, 41))]
        together = engine.run(prompts, 6)
        alone = engine.run(prompts[1:], 6)
    finally:
        engine.close()
    assert [len(request.token_ids) for request in together.requests] == [6, 6]
    assert together.requests[1].token_ids == alone.requests[0].token_ids
    for request in together.requests:
        assert request.first_token_seconds is not None
        assert 0.0 < request.first_token_seconds <= request.finished_seconds
    assert together.wall_seconds == max(r.finished_seconds for r in together.requests)


def test_our_adapter_reports_a_refused_request() -> None:
    engine = PocketLLMEngine()
    try:
        engine.start(_FAKE)
        with pytest.raises(EngineFailure, match="prompt"):
            engine.run([()], 4)
    finally:
        engine.close()


def test_stamp_changes_with_the_requirements(tmp_path: Path) -> None:
    files = (("a.txt", True), ("b.txt", False))
    (tmp_path / "a.txt").write_text("x==1\n")
    (tmp_path / "b.txt").write_text("y==1\n")
    before = requirements_stamp(files, tmp_path)
    assert before == requirements_stamp(files, tmp_path)
    (tmp_path / "b.txt").write_text("y==2\n")
    assert before != requirements_stamp(files, tmp_path)


def test_requirements_of_every_peer_exist_and_are_pinned() -> None:
    names = [name for peer in environments.PEERS.values() for name, _ in peer.requirements]
    assert len(names) >= 4
    for name in names:
        text = (environments.ROOT / "requirements" / name).read_text()
        lines = [line for line in text.splitlines() if line and line[0] not in "#-"]
        assert lines
        assert all("==" in line for line in lines), name


def test_unknown_peer_is_refused() -> None:
    with pytest.raises(EngineFailure, match="unknown peer 'nobody'"):
        environments.prepare("nobody", Path("x.gguf"), 2)


def _compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.setattr(environments, "CACHE", tmp_path / "cache")
    # The benchmark pins its process to two CPUs; the test session must not stay pinned.
    monkeypatch.setattr("perf.run_options.pin_to", lambda _threads: None)
    arguments = ["--model", "fake", "--quick", "--workloads", "A", "--rounds", "2", *more]
    return compare.main([*arguments, "--allow-busy", "--json", str(tmp_path / "run.json")])


def test_a_whole_comparison_against_a_dummy_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(environments.PEERS, "dummy", Peer("perf.engines.dummy_worker"))
    # The dummy counts up, which is not what the fake model says.
    monkeypatch.setattr(compare, "agreeing", lambda *_: "not compared")
    assert _compare(tmp_path, monkeypatch, "--peers", "dummy") == 0
    records = read_records(tmp_path / "run.json")
    figures = [r for r in records if r.metric == "decode_tokens_per_second"]
    assert [(r.engine, r.workload) for r in figures] == [
        *((OURS, "A1"), (OURS, "A8")),
        *(("dummy", "A1"), ("dummy", "A8")),
    ]
    assert all(len(record.samples) == 2 for record in records)
    assert all(record.value > 0 for record in figures)
    facts = json.loads((tmp_path / "run.run.json").read_text())
    assert facts["publishable"] is False
    out = capsys.readouterr().out
    assert "NOT FOR PUBLICATION" in out
    assert "A8, tokens/s" in out


def test_a_peer_that_fails_is_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Peer("perf.engines.dummy_worker", variants=lambda _gguf: {"broken": {"fail": "run"}})
    monkeypatch.setitem(environments.PEERS, "broken", broken)
    assert _compare(tmp_path, monkeypatch, "--peers", "broken") == 0
    assert {record.engine for record in read_records(tmp_path / "run.json")} == {OURS}
    assert "broken: left out: broken: ValueError: asked to fail" in capsys.readouterr().err


def test_an_engine_that_computes_something_else_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(environments.PEERS, "dummy", Peer("perf.engines.dummy_worker"))
    assert _compare(tmp_path, monkeypatch, "--peers", "dummy") == 0
    assert {record.engine for record in read_records(tmp_path / "run.json")} == {OURS}
    assert "of 16 first tokens are ours" in capsys.readouterr().err


def test_agreement_tolerates_near_ties() -> None:
    assert compare.agreeing("x", (1, 9, 9, 9), (1, 2, 3, 4)) == "1 of 4 first tokens as ours"
    with pytest.raises(EngineFailure, match="0 of 4"):
        compare.agreeing("x", (9, 9, 9, 9), (1, 2, 3, 4))


def test_a_paused_worker_does_not_outlive_a_killed_benchmark(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from perf.engines.base import EngineOptions\n"
        "from perf.engines.subprocess_engine import SubprocessEngine\n"
        "module = 'perf.engines.dummy_worker'\n"
        "engine = SubprocessEngine('dummy', sys.executable, module, log=Path(sys.argv[1]))\n"
        "engine.start(EngineOptions(model='none'))\n"
        "engine.pause()\n"
        "print(engine.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    done = subprocess.run(command, cwd=environments.ROOT, stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline and _is_alive(pid):
        time.sleep(0.01)
    assert not _is_alive(pid)


def _is_alive(pid: int) -> bool:
    """Neither gone nor a zombie that its new parent has not awaited yet."""
    try:
        return _state(pid) != "Z"
    except FileNotFoundError:
        return False
