"""`perf.serve_bench`: the trace, the client's ledger, the arithmetic of goodput, and refusal."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from completion_server import CompletionServer

from perf import serve_bench
from perf.engines.base import EngineFailure
from perf.machine import BusyMonitor, CpuSample
from perf.records import find, read_records
from perf.serving import servers
from perf.serving.client import Client, Finished, run_trace
from perf.serving.figures import (
    Objectives,
    TurnResult,
    errors_of,
    figures_of,
    most_at_once,
    table_rows,
    to_records,
    workload,
)
from perf.serving.plot import points
from perf.serving.trace import LENGTHS, Planned, poisson_trace


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with CompletionServer() as running:
        yield running


# --- the trace ------------------------------------------------------------------------------------


def test_arrivals_are_poisson_and_lengths_are_those_of_conversations() -> None:
    trace = poisson_trace(seed=1, round_index=0, rate=2.0, count=4000)
    gaps = [later.at - earlier.at for earlier, later in pairwise(trace)]
    assert statistics.mean(gaps) == pytest.approx(0.5, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)
    assert min(gaps) >= 0
    outputs = [planned.max_tokens for planned in trace]
    assert statistics.median(outputs) == pytest.approx(LENGTHS.output_median, rel=0.1)
    assert max(outputs) == LENGTHS.output_max


def test_a_trace_is_a_function_of_its_arguments_and_shares_no_prefix() -> None:
    trace = poisson_trace(1, 0, 2.0, 50)
    assert poisson_trace(1, 0, 2.0, 50) == trace
    for other in (poisson_trace(2, 0, 2.0, 50), poisson_trace(1, 1, 2.0, 50)):
        assert not {p.prompt for p in other} & {p.prompt for p in trace}
    first = [planned.prompt.split()[0] for planned in trace + poisson_trace(1, 1, 2.0, 50)]
    assert len(set(first)) == 100
    for rate, count in ((0.0, 5), (1.0, 0)):
        with pytest.raises(ValueError, match="must be positive"):
            poisson_trace(1, 0, rate, count)


# --- the client -----------------------------------------------------------------------------------


def test_every_request_has_its_end_in_the_ledger(server: CompletionServer) -> None:
    ends = {
        "ok": "",
        "pairs": "",
        "stop": "ended with stop before its last token",
        "refuse": "ServerError: status 503",
        "cut": "ServerError: the stream ended without [DONE]",
        "error": "ServerError: {'message': 'engine dead'}",
    }
    trace = [Planned(0.01 * n, f"{word} prompt", 4) for n, word in enumerate(ends)]
    ledger = run_trace(server.url, trace, {"ignore_eos": True})
    assert [request.planned for request in ledger] == trace
    for request, end in zip(ledger, ends.values(), strict=True):
        assert request.error.startswith(end), request
        assert bool(request.error) == bool(end)
        assert request.tokens == (0 if end else 4)
        assert request.planned.at <= request.sent <= request.ended
    assert [len(request.arrivals) for request in ledger[:2]] == [4, 2]
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)


def test_a_server_that_is_gone_is_in_the_ledger_too() -> None:
    with CompletionServer() as gone:
        url = gone.url
    (request,) = run_trace(url, [Planned(0.0, "ok", 4)], {})
    assert "ConnectionRefusedError" in request.error


def test_the_client_is_an_open_loop_in_a_process_of_its_own() -> None:
    """A slow server does not hold arrivals back."""
    trace = [Planned(0.05 * n, "ok", 3) for n in range(8)]
    with CompletionServer(delay=0.4) as slow, Client() as client:
        assert client.pid != os.getpid()
        ledger = client.send(slow.url, trace, {})
    assert [request.error for request in ledger] == [""] * 8
    assert max(request.sent for request in ledger) < min(request.ended for request in ledger)
    assert most_at_once(ledger) == 8


# --- arithmetic -----------------------------------------------------------------------------------


def finished(at: float, first: float, per_token: float, tokens: int = 5) -> Finished:
    arrivals = tuple(at + first + n * per_token for n in range(tokens))
    return Finished(Planned(at, "p", tokens), at, arrivals, arrivals[-1])


def lost(at: float, ended: float) -> Finished:
    return Finished(Planned(at, "p", 5), at, (at + 0.1,), ended, "cut")


def test_goodput_counts_requests_that_meet_both_objectives() -> None:
    ledger = (
        finished(0.0, 0.5, 0.05),  # good
        finished(1.0, 1.0, 0.1),  # good: at both limits
        finished(1.0, 1.5, 0.05),  # first token late
        finished(2.0, 0.5, 0.2),  # others slow
        lost(2.0, 10.0),
    )
    values = figures_of(TurnResult(ledger, cpu_seconds=4.0), Objectives(1.0, 0.1 + 1e-9))
    by_name = {metric: value for (metric, _), value in values.items()}
    assert by_name["goodput_requests_per_second"] == pytest.approx(2 / 10)
    assert by_name["good_ratio"] == pytest.approx(0.4)
    assert by_name["failed_requests"] == 1
    assert by_name["output_tokens_per_second"] == pytest.approx(20 / 10)
    assert by_name["output_tokens_per_cpu_second"] == pytest.approx(20 / 4)
    assert by_name["ttft_seconds_p50"] == pytest.approx(0.5)
    assert by_name["ttft_seconds_p95"] == pytest.approx(1.5)
    assert by_name["per_output_token_seconds_p99"] == pytest.approx(0.2)


def test_a_late_client_does_not_flatter_the_server() -> None:
    late = Finished(Planned(1.0, "p", 1), 3.0, (3.2,), 3.2)
    assert late.ttft == pytest.approx(2.2)
    assert late.seconds == pytest.approx(2.2)
    assert late.per_output_token == 0.0


def test_a_server_that_fails_everything_has_no_latency_and_no_goodput() -> None:
    turns = {("x", 1.0): [TurnResult((lost(0.0, 5.0),), 1.0)]}
    records = to_records(turns, Objectives())
    (row,) = table_rows(records, [1.0])
    assert row[:5] == ("x, 1/s", "0", "0 %", "1", "0")
    assert row[6] == "-"
    assert errors_of(turns) == ["1 x x: cut"]
    with pytest.raises(ValueError, match="empty ledger"):
        figures_of(TurnResult((), 1.0), Objectives())


def test_records_are_medians_of_rounds() -> None:
    rounds = [TurnResult((finished(0.0, first, 0.01),), 1.0) for first in (0.1, 0.3, 0.2)]
    records = to_records({("x", 2.0): rounds}, Objectives())
    record = find(records, engine="x", workload=workload(2.0), metric="ttft_seconds_p50")
    assert record is not None
    assert record.value == pytest.approx(0.2)
    assert record.samples == pytest.approx((0.1, 0.3, 0.2))
    (point,) = points(records, "x", [2.0, 4.0], "output_tokens_per_second", "ttft_seconds_p50")
    assert point[1] == pytest.approx(0.2)


# --- turns and refusal ----------------------------------------------------------------------------


class FakeServer(servers.Server):
    """Is what its test says, and notes when it is stopped and continued."""

    def __init__(self, name: str, journal: list[str]) -> None:
        super().__init__(name, (), 1, {}, Path("log"))
        self.journal = journal

    @property
    def pid(self) -> int:
        return 1

    def resume(self) -> None:
        self.journal.append(f"+{self.name}")

    def pause(self) -> None:
        self.journal.append(f"-{self.name}")


class FakeClient(Client):
    """Every request is answered at once."""

    pid = 2

    def __init__(self) -> None:
        self.traces: list[Sequence[Planned]] = []

    def send(
        self, url: str, trace: Sequence[Planned], options: Mapping[str, object]
    ) -> list[Finished]:
        self.traces.append(trace)
        return [finished(planned.at, 0.1, 0.01, planned.max_tokens) for planned in trace]


def monitor(foreign: Iterator[float]) -> BusyMonitor:
    """Samples a second apart; ``foreign``: seconds of others' CPU time in each measurement."""
    clock, busy, turn = 0.0, 0.0, 0

    def sample(pids: tuple[int, ...]) -> CpuSample:
        nonlocal clock, busy, turn
        if len(pids) == 2:  # begin or end of a measurement, not a look at the server alone
            turn += 1
            if turn % 2 == 0:
                clock, busy = clock + 1.0, busy + next(foreign)
        return CpuSample(clock, busy, 0.0)

    return BusyMonitor(cores=2, sample=sample)


def plan(foreign: Sequence[float], rounds: int = 2) -> serve_bench.Plan:
    return serve_bench.Plan([1.0], 5, rounds, 0, monitor(iter(foreign)), FakeClient(), retries=1)


def test_turns_are_interleaved_and_peers_stopped_outside_theirs() -> None:
    journal: list[str] = []
    turns = serve_bench.measure([FakeServer(n, journal) for n in "ab"], plan([0.0] * 4))
    assert "".join(journal) == "+a-a+b-b" + "+a-a+b-b" + "+b-b+a-a"
    assert {key: len(found) for key, found in turns.items()} == {("a", 1.0): 2, ("b", 1.0): 2}


def test_all_servers_of_a_round_get_the_same_requests() -> None:
    made = plan([0.0] * 4)
    serve_bench.measure([FakeServer(n, []) for n in "ab"], made)
    assert isinstance(made.client, FakeClient)
    _, _, a1, b1, b2, a2 = made.client.traces
    assert a1 == b1 != b2 == a2


def test_a_disturbed_turn_is_repeated_with_fresh_prompts_and_then_named() -> None:
    made = plan([1.0, 0.0, 1.0, 1.0], rounds=1)
    serve_bench.measure([FakeServer(n, []) for n in "ab"], made)
    assert made.disturbed == ["b at 1/s, round 1"]
    assert isinstance(made.client, FakeClient)
    traces = made.client.traces[2:]
    assert len(traces) == 4
    assert traces[0] != traces[1]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_bench, "pin_to", lambda _threads: None)
    monkeypatch.setattr(serve_bench, "start_all", lambda *_: [FakeServer("x", [])])
    monkeypatch.setattr(FakeClient, "__exit__", lambda *_: None)
    monkeypatch.setattr(FakeClient, "__enter__", lambda self: self)
    monkeypatch.setattr(serve_bench, "Client", FakeClient)


ARGUMENTS = ["--model", "fake", "--rates", "1", "--requests", "3", "--rounds", "1"]


@pytest.mark.usefixtures("fakes")
def test_nothing_is_published_from_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BusyMonitor, "require_quiet", lambda _self: None)
    monkeypatch.setattr(BusyMonitor, "last_was_quiet", lambda _self: False)
    json, picture = tmp_path / "run.json", tmp_path / "run.png"
    arguments = [*ARGUMENTS, "--json", str(json), "--plot", str(picture)]
    assert serve_bench.main(arguments) == 3
    captured = capsys.readouterr()
    assert "refused: other processes used the CPU in 1 turns (x at 1/s, round 1)" in captured.err
    assert "goodput" not in captured.out
    assert not picture.exists()
    assert '"publishable": false' in json.with_suffix(".run.json").read_text()
    assert serve_bench.main([*ARGUMENTS, "--allow-busy", "--json", str(json)]) == 0
    assert "NOT FOR PUBLICATION" in capsys.readouterr().out
    assert read_records(json)
    with pytest.raises(SystemExit):
        serve_bench.main([*ARGUMENTS, "--allow-busy", "--update-docs"])


# --- servers --------------------------------------------------------------------------------------


def test_peers_without_a_server_are_left_out_by_name() -> None:
    with pytest.raises(EngineFailure, match=r"openvino is left out: .*not on PyPI"):
        servers.peer_server("openvino", Path("m.gguf"), 2, 2)
    with pytest.raises(EngineFailure, match=r"unknown peer 'x'; known: llama\.cpp, vllm"):
        servers.peer_server("x", Path("m.gguf"), 2, 2)


def test_peers_are_told_to_go_on_after_the_end_of_sequence() -> None:
    command, body = servers.peer_command("llama.cpp", "py", Path("m.gguf"), 81, 2, 7)
    assert body == {"model": "llama.cpp", "logit_bias": {"7": -100}}
    assert command[command.index("--interrupt_requests") + 1] == "false"
    command, body = servers.peer_command("vllm", "py", Path("dir"), 81, 2, 7)
    assert body == {"model": "vllm", "ignore_eos": True}
    assert command[command.index("--max-num-seqs") + 1] == str(servers.SEQUENCES)


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    port = random.randint(20000, 30000)
    command = ["sh", "-c", "echo no such model; exit 3"]
    server = servers.Server("x", command, port, {}, tmp_path / "x.log")
    with pytest.raises(EngineFailure, match=r"x did not start.*no such model"):
        server.start()
    server.stop()
