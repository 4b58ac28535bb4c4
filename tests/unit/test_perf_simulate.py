"""perf.simulate: conservation, closed forms, determinism, files and the command line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from perf import simulate
from perf.records import read_records
from perf.simulation.cost import CostModel, fit
from perf.simulation.fit import measure
from perf.simulation.replay import Outcome, Replay, Server
from perf.simulation.summary import Objective, quantile, summarise, weighted_quantile
from perf.simulation.synthetic import Lengths, Workload, generate
from perf.simulation.trace import TraceRequest, deal, read_trace, write_trace
from pocket_backend.core import SchedulerConfig

COST = CostModel(base=5e-3, per_prefill=1e-3, per_decode=2e-3, per_attended=1e-6)
SMALL = Server(COST, slots=8, kv_tokens=9000, budget=128)
"""Hardly more than the longest request: the synthetic trace makes it preempt and evict."""


def replay(
    trace: list[TraceRequest], server: Server = SMALL, *, check_every: int = 0, **config: object
) -> Outcome:
    return Replay(trace, server, SchedulerConfig(**config)).run(  # type: ignore[arg-type]
        check_every=check_every
    )


@pytest.fixture(scope="module")
def busy_trace() -> list[TraceRequest]:
    return generate(Workload(rate=6.0), 250, seed=3)


# -- what must hold for every trace ---------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_every_request_finishes_once_with_all_its_tokens(
    busy_trace: list[TraceRequest], policy: str
) -> None:
    outcome = replay(busy_trace, policy=policy, watermark=0.0, check_every=97)
    assert outcome.preemptions > 0
    assert Counter(outcome.index.tolist()) == Counter(range(len(busy_trace)))
    assert (outcome.refused, outcome.failed) == (0, 0)
    wanted = [busy_trace[i].output_tokens for i in outcome.index]
    assert outcome.output_tokens.tolist() == wanted


def test_virtual_time_runs_forward(busy_trace: list[TraceRequest]) -> None:
    outcome = replay(busy_trace)
    asked = np.array([busy_trace[i].arrival_seconds for i in outcome.index])
    assert (outcome.arrival >= asked).all()
    assert (outcome.first_token > outcome.arrival).all()
    assert (outcome.finish >= outcome.first_token).all()
    assert (np.diff(outcome.finish) >= 0).all()
    assert (outcome.gap_seconds > 0).all()
    assert 0 < outcome.busy_seconds <= outcome.seconds == outcome.finish.max()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_gaps_add_up_to_the_time_between_first_and_last_token(
    busy_trace: list[TraceRequest], policy: str
) -> None:
    # Whatever happened between (steps with prefills, preemptions), no gap is lost or counted twice.
    outcome = replay(busy_trace, policy=policy, watermark=0.0)
    assert outcome.preemptions > 0
    assert outcome.gap_counts.sum() == (outcome.output_tokens - 1).sum()
    spans = (outcome.finish - outcome.first_token).sum()
    assert (outcome.gap_seconds * outcome.gap_counts).sum() == pytest.approx(spans, rel=1e-9)


def test_same_arguments_same_outcome(busy_trace: list[TraceRequest]) -> None:
    first, again = replay(busy_trace, policy="lpm"), replay(busy_trace, policy="lpm")
    assert first.index.tolist() == again.index.tolist()
    assert first.finish.tolist() == again.finish.tolist()
    assert generate(Workload(rate=6.0), 250, seed=3) == busy_trace
    assert generate(Workload(rate=6.0), 250, seed=4) != busy_trace
    assert generate(Workload(rate=6.0), 250, seed=3, server=1) != busy_trace


def test_outcome_does_not_depend_on_the_number_of_processes() -> None:
    source = simulate.Source(None, Workload(rate=2.0), requests=40, servers=3, seed=1)
    chosen = simulate.variants("fcfs,lpm", [])
    one = simulate.run(source, SMALL, chosen, processes=1)
    two = simulate.run(source, SMALL, chosen, processes=2)
    assert [[o.finish.tolist() for o in v] for v in one] == [
        [o.finish.tolist() for o in v] for v in two
    ]
    assert [len(o.index) for o in one[0]] == [14, 13, 13]


# -- closed forms ---------------------------------------------------------------------------------


def test_a_request_alone_takes_the_sum_of_its_steps() -> None:
    prompt, output, budget = 300, 5, 128
    outcome = replay([TraceRequest(2.5, prompt, output)], Server(COST, budget=budget))
    prefill = 0.0
    for begin in range(0, prompt, budget):
        count = min(budget, prompt - begin)
        attended = sum(range(begin + 1, begin + count + 1))
        prefill += 5e-3 + 1e-3 * count + 1e-6 * attended
    decodes = [5e-3 + 2e-3 + 1e-6 * (prompt + k) for k in range(1, output)]
    assert outcome.first_token[0] == pytest.approx(2.5 + prefill)
    assert outcome.finish[0] == pytest.approx(2.5 + prefill + sum(decodes))
    assert outcome.gap_seconds.tolist() == pytest.approx(decodes)
    assert outcome.gap_counts.tolist() == [1] * (output - 1)
    assert outcome.busy_seconds == pytest.approx(prefill + sum(decodes))


def test_a_later_turn_comes_after_the_answer_and_finds_the_session_cached() -> None:
    first = TraceRequest(1.0, 100, 20, prefix="system", prefix_tokens=60, session="s")
    second = TraceRequest(1.0, 40, 3, session="s", think_seconds=7.0)
    outcome = replay([first, second])
    assert outcome.index.tolist() == [0, 1]
    assert outcome.arrival[1] == pytest.approx(outcome.finish[0] + 7.0)
    # 60 + 100 + 20 tokens, the last of which has no KV: 179 // 16 full blocks.
    assert outcome.prefix_hit_tokens == 179 // 16 * 16
    assert outcome.prefix_query_tokens == 160 + 220


def test_a_shared_prefix_is_found_and_prompts_of_their_own_are_not() -> None:
    shared = [TraceRequest(i * 10.0, 33, 2, prefix="p", prefix_tokens=64) for i in range(3)]
    assert replay(shared).prefix_hit_tokens == 2 * 64
    apart = [TraceRequest(i * 10.0, 97, 2) for i in range(3)]
    assert replay(apart).prefix_hit_tokens == 0


def test_refused_requests_and_the_turns_after_them_are_counted() -> None:
    trace = [
        TraceRequest(0.0, 9000, 4, session="s"),
        TraceRequest(0.0, 10, 4, session="s"),
        TraceRequest(0.0, 10, 4),
    ]
    outcome = replay(trace)
    assert (outcome.refused, outcome.failed, outcome.index.tolist()) == (1, 1, [2])


def test_deadlines_fail_requests_and_end_their_sessions() -> None:
    trace = [
        TraceRequest(0.0, 2000, 500),
        TraceRequest(0.1, 50, 4, session="s"),
        TraceRequest(0.1, 10, 4, session="s"),
    ]
    outcome = replay(trace, max_running=1, queue_timeout_seconds=0.5)
    assert (outcome.refused, outcome.failed, outcome.index.tolist()) == (0, 2, [0])


# -- cost model -----------------------------------------------------------------------------------


def test_fit_recovers_the_model_that_made_the_samples() -> None:
    shapes = [(0, 1, 32), (0, 8, 4000), (512, 0, 131328), (128, 4, 9000), (64, 0, 133152)]
    found = fit([(*shape, COST.seconds(*shape)) for shape in shapes])
    assert found.model.values == pytest.approx(COST.values, rel=1e-6)
    assert found.worst_error < 1e-6


def test_fit_has_no_negative_coefficients() -> None:
    # Attended positions that make a step cheaper: noise, not a cost.
    shapes = [(n, 1, n * d) for n in (0, 64, 256) for d in (1, 50, 900)]
    samples = [(n, k, a, 3e-3 + 1e-3 * n - 1e-7 * a) for n, k, a in shapes]
    found = fit(samples).model
    assert found.per_attended == 0
    assert found.per_prefill == pytest.approx(1e-3, rel=0.1)


def test_cost_model_is_read_as_it_is_printed() -> None:
    assert CostModel.parse(str(COST)).values == pytest.approx(COST.values)
    for text in ("1,2,3", "1,2,3,x", "0,0,0,1", "-1,2,3,4"):
        with pytest.raises(ValueError, match=r"cost|convert"):
            CostModel.parse(text)


def test_measuring_hands_the_executor_valid_steps() -> None:
    # The fake executor raises on a step that breaks the contract.
    assert measure("fake", threads=1, repeats=1).samples > 20


# -- traces ---------------------------------------------------------------------------------------


def test_trace_file_round_trip(tmp_path: Path, busy_trace: list[TraceRequest]) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, busy_trace)
    assert read_trace(path) == busy_trace
    assert json.loads(path.read_text().splitlines()[0])["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arrival_seconds": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens: got 0"),
        ('{"arrival_seconds": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival_seconds"),
        ('{"arrival_seconds": 0, "prompt_tokens": 1}', "output_tokens"),
        ('{"prompt": 1}', "unknown keys: prompt"),
        ("[1]", "JSON object"),
        ("{", "line 2"),
    ],
)
def test_bad_trace_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n" + line + "\n")
    with pytest.raises(ValueError, match=f"line 2.*{message}|{message}"):
        read_trace(path)


def test_dealing_keeps_sessions_together(busy_trace: list[TraceRequest]) -> None:
    shares = deal(busy_trace, 3)
    assert sum(len(share) for share in shares) == len(busy_trace)
    homes = [{r.session for r in share if r.session} for share in shares]
    assert not homes[0] & homes[1] | homes[0] & homes[2] | homes[1] & homes[2]


def test_synthetic_trace_has_the_stated_distributions() -> None:
    lengths = Lengths(mean=200, sigma=0.9, high=10**6).draw(np.random.default_rng(0), 50_000)
    assert lengths.mean() == pytest.approx(200, rel=0.03)
    assert np.log(lengths[lengths > 0]).std() == pytest.approx(0.9, rel=0.03)
    trace = generate(Workload(rate=2.0), 8000, seed=0)
    assert len(trace) == 8000
    assert trace[-1].arrival_seconds == pytest.approx(4000, rel=0.1)
    by_kind = Counter(r.kind for r in trace)
    assert set(by_kind) == {"chat", "single", "batch", "long"}
    chat = [r for r in trace if r.kind == "chat"]
    assert len({r.prefix for r in chat}) == 8
    totals: Counter[str] = Counter()
    for request in trace:
        prefix = request.prefix_tokens if request.session not in totals else 0
        key = request.session or f"alone-{len(totals)}"
        totals[key] += prefix + request.prompt_tokens + request.output_tokens
    assert max(totals.values()) <= 8192


def test_bursts_share_a_prefix_that_waiting_lets_them_compute_once() -> None:
    trace = generate(Workload(rate=1.0, mix="bursts"), 64, seed=0)
    assert len({r.arrival_seconds for r in trace}) == len({r.prefix for r in trace}) == 4
    server = Server(COST)
    waiting, hasty = replay(trace, server), replay(trace, server, prefix_wait_steps=0)
    assert waiting.prefix_hit_tokens == 4 * 15 * 1024
    assert hasty.computed_tokens > 2 * waiting.computed_tokens


# -- figures --------------------------------------------------------------------------------------


def test_quantiles_against_numpy() -> None:
    random = np.random.default_rng(5)
    values = np.sort(random.random(37))
    counts = random.integers(1, 9, 37)
    for q in (0.01, 0.5, 0.9, 0.99, 1.0):
        expected = np.quantile(np.repeat(values, counts), q, method="inverted_cdf")
        assert weighted_quantile(values, counts, q) == expected
        assert quantile(values, q) == np.quantile(values, q, method="inverted_cdf")


def test_goodput_counts_requests_that_keep_both_limits() -> None:
    trace = [TraceRequest(0.0, 100, 11), TraceRequest(100.0, 100, 11), TraceRequest(200.0, 3000, 2)]
    outcome = replay(trace)
    kinds = [["a", "a", "b"]]
    loose = summarise("v", [outcome], kinds, Objective(ttft=1.0, per_token=0.1))
    assert (loose.good, loose.requests) == (2, 3)
    assert loose.goodput == pytest.approx(2 / outcome.seconds)
    assert summarise("v", [outcome], kinds, Objective(ttft=1.0, per_token=0.001)).good == 0
    assert loose.ttft_at(0.5, "b") > 3.0 > loose.ttft_at(0.99, "a")


# -- command line ---------------------------------------------------------------------------------


def test_command_line_prints_a_table_and_writes_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    common = ["--processes", "1", "--policy", "fcfs", "--set", "prefix_wait_steps=0,64"]
    made = ["--requests", "30", "--servers", "1", "--write-trace", str(trace), "--json", str(out)]
    assert simulate.main([*common, *made]) == 0
    text = capsys.readouterr().out
    assert "fcfs prefix_wait_steps=64" in text
    assert "30 requests per variant" in text
    written = read_records(out)
    assert {r.workload for r in written} == {f"fcfs prefix_wait_steps={n}" for n in (0, 64)}
    assert {r.value for r in written if r.metric == "requests_total"} == {30.0}

    again = tmp_path / "again.json"
    assert simulate.main([*common, "--trace", str(trace), "--json", str(again)]) == 0
    assert read_records(again) == written


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "random"],
        ["--set", "policy=fcfs"],
        ["--set", "watermark"],
        ["--set", "watermark=2"],
        ["--cost", "1,2"],
        ["--requests", "0"],
        ["--trace", "no-such-file.jsonl"],
    ],
)
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        simulate.main([*arguments, "--processes", "1"])
    assert stopped.value.code == 2


def test_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plots" / "out.png"
    assert simulate.main(["--requests", "40", "--processes", "1", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
