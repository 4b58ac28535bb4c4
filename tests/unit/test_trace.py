"""Recorded steps, timelines and traces: on the fake executor, in virtual time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from engine_support import ManualClock, Recorder, make_stepper, request
from trace_format import check_trace, slices

from pocket_backend.cli.main import main
from pocket_backend.engine.recording import record_steps
from pocket_backend.engine.stepper import EngineStepper
from pocket_backend.executors.fake import FakeExecutor, FakeOptions
from pocket_backend.observability.chrome_trace import chrome_trace
from pocket_backend.observability.steps import StepRecorder
from pocket_backend.observability.timeline import Phase, Timeline, timelines

ENGINE, SLOTS, REQUESTS = 1, 2, 3
STEP = 0.01
"""Seconds that a step takes in virtual time."""


class Run:
    """A stepper with a recorder. Each step takes ``STEP``; a turn between two steps nothing."""

    def __init__(self, options: FakeOptions | None = None, **changes: object) -> None:
        self.clock = ManualClock(100.0)
        self.recorder = StepRecorder()
        self.stepper: EngineStepper
        self.executor: FakeExecutor
        self.stepper, self.executor = make_stepper(options, clock=self.clock, **changes)
        self.executor.faults.before_step = lambda _requests: self.clock_moves()
        self._hook = record_steps(self.recorder)

    def clock_moves(self) -> None:
        self.clock.now += STEP

    def submit(self, name: str, prompt_tokens: int, max_tokens: int = 4, **fields: object) -> None:
        prompt = [1 + (number * 7 + len(name)) % 250 for number in range(prompt_tokens)]
        prompt[0] = sum(name.encode()) % 250 + 1  # nothing shared
        asked = request(name, prompt, max_tokens, **fields)
        self.stepper.add(self.stepper.entry(asked, Recorder()))

    def step(self, times: int = 10_000, drain: Callable[[], None] = lambda: None) -> None:
        for _ in range(times):
            more = self.stepper.step(drain)
            report = self.stepper.take_report()
            if report is not None:
                self._hook(report)
            if not more:
                return

    @property
    def lives(self) -> dict[str, Timeline]:
        found = timelines(self.recorder.steps, self.recorder.sequences)
        return {life.sequence: life for life in found}

    @property
    def trace(self) -> dict[str, object]:
        return chrome_trace(self.recorder.steps, self.recorder.sequences)


def shape(life: Timeline) -> list[tuple[str, int, float, float]]:
    """(phase, tokens, begin, end) with times in steps since 100 s."""

    def steps(seconds: float) -> float:
        return round((seconds - 100.0) / STEP, 3)

    return [(p.name, p.tokens, steps(p.begin), steps(p.end)) for p in life.phases]


def test_a_life_is_queue_chunks_and_decode() -> None:
    run = Run(FakeOptions(max_batch_tokens=32, max_slots=1))
    run.submit("long", 80, max_tokens=4)
    run.submit("second", 8, max_tokens=2)
    run.step()
    lives = run.lives
    assert shape(lives["long"]) == [
        ("queue", 0, 0, 0),
        ("prefill", 32, 0, 1),
        ("prefill", 32, 1, 2),
        ("prefill", 16, 2, 3),
        ("decode", 3, 3, 6),
    ]
    assert [(p.start, p.steps) for p in lives["long"].phases[1:]] == [
        (0, 1),
        (32, 1),
        (64, 1),
        (80, 3),
    ]
    assert shape(lives["second"]) == [("queue", 0, 0, 6), ("prefill", 8, 6, 7), ("decode", 1, 7, 8)]
    record = lives["long"].record
    assert record is not None
    assert (record.reason, record.prompt_tokens, record.output_tokens) == ("length", 80, 4)


def test_the_trace_keeps_the_format_and_shows_slots_and_steps() -> None:
    run = Run(FakeOptions(max_batch_tokens=32, max_slots=2))
    for name, tokens in (("a", 70), ("b", 5), ("c", 20)):
        run.submit(name, tokens)
    run.step()
    events = check_trace(run.trace)
    steps = slices(events, ENGINE)
    assert len(steps) == run.executor.steps
    assert all(step["dur"] == STEP * 1e6 for step in steps)
    assert sum(step["args"]["tokens"] for step in steps) == run.executor.computed_tokens
    in_slots = slices(events, SLOTS)
    stays = [event for event in in_slots if event["cat"] == "slot"]
    assert sorted(event["name"] for event in stays) == ["a", "b", "c"]
    assert {event["tid"] for event in in_slots} == {1, 2}
    assert sum(e["args"]["tokens"] for e in in_slots if e["cat"] == "phase") == sum(
        step["args"]["tokens"] for step in steps
    )
    begun = [event["name"] for event in events if event["ph"] == "b"]
    assert begun.count("queue") == 3
    assert {"a", "b", "c", "prefill", "decode"} <= set(begun)
    counters = [event for event in events if event["ph"] == "C"]
    assert counters[-1]["args"] == {"prefill": 0, "decode": 0}


def test_a_preempted_sequence_waits_and_comes_back() -> None:
    run = Run(FakeOptions(num_blocks=6, block_size=4, max_slots=2), enable_prefix_caching=False)
    run.submit("first", 8, max_tokens=14)
    run.submit("loser", 8, max_tokens=14)
    run.step()
    assert run.stepper.stats.preemptions
    life = run.lives["loser"]
    names = [phase.name for phase in life.phases]
    assert names[:3] == ["queue", "prefill", "decode"]
    at = names.index("preempted")
    assert names[at + 1] == "prefill"  # its output so far is part of its prompt
    assert life.phases[at].begin == life.phases[at - 1].end
    assert life.phases[at].end == life.phases[at + 1].begin
    assert life.phases[at].end > life.phases[at].begin
    events = check_trace(run.trace)
    stays = [e for e in slices(events, SLOTS) if e["name"] == "loser"]
    assert len(stays) == names.count("preempted") + 1


def test_a_failed_step_computes_nothing_and_is_no_preemption() -> None:
    run = Run()
    run.submit("a", 6)
    run.submit("b", 6)
    run.step(1)
    run.executor.faults.failing_steps = 1
    run.step()
    lives = run.lives
    for life in lives.values():
        assert [phase.name for phase in life.phases] == ["queue", "prefill", "decode"]
        assert life.phases[-1].tokens == 3
    assert lives["a"].phases[-1].steps == 4
    events = check_trace(run.trace)
    assert [step["name"] for step in slices(events, ENGINE)].count("failed step") == 1


def test_what_never_ran_only_queued() -> None:
    run = Run(FakeOptions(max_slots=1))
    run.submit("runs", 4, max_tokens=6)
    run.submit("late", 4, deadline_seconds=2.5 * STEP)
    run.submit("gone", 4)
    run.step(2)
    gone = run.stepper.outputs.entries["gone"]
    run.stepper.cancel(gone)
    run.step()
    lives = run.lives
    assert shape(lives["late"]) == [("queue", 0, 0, 3)]
    assert shape(lives["gone"]) == [("queue", 0, 0, 2)]
    records = {name: life.record for name, life in lives.items()}
    assert records["late"] is not None
    assert records["late"].reason == "error"
    assert records["gone"] is not None
    assert records["gone"].reason == "cancelled"
    check_trace(run.trace)


def test_choices_have_lives_of_their_own() -> None:
    run = Run()
    run.submit("many", 20, n=3, temperature=1.0, seed=1)
    run.step()
    lives = run.lives
    assert set(lives) == {"many#0", "many#1", "many#2"}
    assert all(life.record is not None for life in lives.values())
    check_trace(run.trace)


def test_an_id_that_is_used_again_gives_two_lives() -> None:
    run = Run()
    run.submit("same", 4, max_tokens=2)
    run.step()
    run.clock.now += 1.0
    run.submit("same", 4, max_tokens=3)
    run.step()
    first, second = timelines(run.recorder.steps, run.recorder.sequences)
    assert (first.phases[-1].tokens, second.phases[-1].tokens) == (1, 2)
    assert second.begin >= first.end + 1.0
    check_trace(run.trace)


def test_a_running_sequence_has_no_end_yet() -> None:
    run = Run()
    run.submit("open", 4, max_tokens=50)
    run.step(3)
    life = run.lives["open"]
    assert life.record is None
    assert [phase.name for phase in life.phases] == ["prefill", "decode"]
    check_trace(run.trace)


def test_the_ring_keeps_the_last_steps() -> None:
    run = Run()
    run.recorder = StepRecorder(capacity=5)
    run._hook = record_steps(run.recorder)
    run.submit("a", 4, max_tokens=12)
    run.step()
    assert len(run.recorder.steps) == 5
    assert run.recorder.overwritten == run.executor.steps - 5
    assert run.recorder.steps[-1].ended == run.clock.now
    [life] = run.lives.values()
    assert life.phases[0] == Phase("queue", 100.0, 100.0)
    assert [(phase.name, phase.steps) for phase in life.phases[1:]] == [("decode", 5)]
    check_trace(run.trace)
    with pytest.raises(ValueError, match="capacity: got 0"):
        StepRecorder(0)


def test_an_empty_recorder_gives_an_empty_trace() -> None:
    assert check_trace(chrome_trace([], [])) == []


# --- the command line -----------------------------------------------------------------------------


def test_trace_writes_a_file_that_perfetto_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, prompts = tmp_path / "out.json", tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo words\n" + "x" * 700 + "\n")
    argv = ["trace", "fake", "-f", str(prompts), "-o", str(output), "-n", "5", "--json"]
    assert main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    events = check_trace(json.loads(output.read_text()))
    assert printed["file"] == str(output)
    assert len(slices(events, ENGINE)) == printed["steps"]
    assert {life["sequence"] for life in printed["timelines"]} == {
        "prompt-1",
        "prompt-2",
        "prompt-3",
    }
    long = next(life for life in printed["timelines"] if life["sequence"] == "prompt-3")
    phases = [phase["phase"] for phase in long["phases"]]
    assert phases.count("prefill") >= 2
    assert main([*argv[:-1], "--interval", "0.001"]) == 0
    assert "3 requests in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-f", "/nowhere/prompts"], "--file"),
        (["-o", "/nowhere/at/all.json"], "--output"),
        (["--interval", "-1"], "--interval"),
        (["-n", "0"], "max_tokens"),
        (["-m", "fake"], "MODEL and --model"),
    ],
)
def test_trace_refuses_by_name(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "fake", *argv]) == 2
    assert message in capsys.readouterr().err


def test_run_prints_a_timeline_on_demand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    argv = ["run", "-m", "fake", "--raw", "-n", "4", "--json", "hello"]
    assert main(argv) == 0
    assert "timeline" not in json.loads(capsys.readouterr().out)
    assert main([*argv, "--timeline"]) == 0
    answer = json.loads(capsys.readouterr().out)
    phases = answer["timeline"]["phases"]
    assert [phase["phase"] for phase in phases] == ["queue", "prefill", "decode"]
    assert [phase.get("tokens") for phase in phases] == [None, 5, 3]
    assert phases[0]["begin_seconds"] == 0
    assert all(a["end_seconds"] <= b["begin_seconds"] for a, b in pairwise(phases))
    assert phases[-1]["end_seconds"] <= answer["timeline"]["seconds"]


@pytest.mark.parametrize(
    "argv", [["--timeline", "hi"], ["--timeline", "--json", "--url", "127.0.0.1:1", "hi"]]
)
def test_a_timeline_needs_json_and_an_engine_here(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["run", *argv]) == 2
    assert "--timeline" in capsys.readouterr().err
