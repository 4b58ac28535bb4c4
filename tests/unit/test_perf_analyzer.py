"""The reader of perf_analyzer's exports (pieces of real ones lie in ``data/``), and the account."""

from __future__ import annotations

import json
import random
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perf.analyzer import figures, install
from perf.analyzer.__main__ import input_data, main
from perf.analyzer.export import AnalyzedRequest, Delivery, ExportError, read_export
from perf.analyzer.plots import points
from perf.engines.base import EngineFailure

DATA = Path(__file__).parent / "data"
METRICS = """
pocket_requests_total{reason="stop"} 3
pocket_requests_total{reason="length"} 4
pocket_requests_total{reason="cancelled"} 1
pocket_requests_total{reason="error"} 0
pocket_requests_refused_total{reason="invalid"} 2
pocket_tokens_total{type="prompt"} 1.5e+03
pocket_tokens_total{type="generated"} 99
pocket_tokens_total{type="cached"} 16
"""


def made(tmp_path: Path, *requests: dict[str, Any]) -> Path:
    path = tmp_path / "x.export.json"
    path.write_text(json.dumps({"experiments": [{"requests": list(requests)}]}))
    return path


def grpc_output(tokens: int, reason: str = "") -> dict[str, Any]:
    """``token_ids`` is what perf_analyzer writes for a tensor without elements: garbage."""
    return {"num_output_tokens": tokens, "num_input_tokens": 5, "finish_reason": reason,
            "token_ids": -27951847}  # fmt: skip


@pytest.mark.parametrize(("protocol", "tokens"), [("grpc", [20, 24]), ("http", [14, 16])])
def test_a_real_export(protocol: str, tokens: list[int]) -> None:
    found = read_export(DATA / f"perf_analyzer_{protocol}.export.json")
    assert sorted(request.tokens for request in found) == tokens
    assert [request.finish_reason for request in found] == ["length", "length"]
    assert found[0].began == 0.0
    assert found[1].began > 0.0
    for request in found:
        assert request.prompt_tokens > 0
        assert request.ttft is not None
        assert 0.1 < request.ttft < 10
        assert len(request.gaps) == len(request.deliveries) - 1
        assert min(request.gaps) >= 0
        assert request.ended - request.began >= sum(request.gaps)
    records = figures.to_records(protocol, 2, found)
    (row,) = figures.table_rows(records)
    assert row[:3] == (f"{protocol}, 2", "2", str(sum(tokens)))
    assert "-" not in row
    assert points(records, protocol, "ttft_seconds_p50")[0][0] == 2


def test_tokens_are_counted_by_the_running_count(tmp_path: Path) -> None:
    second = 10**9
    entry = {
        "timestamp": 1796018944224930414,
        "response_timestamps": [1796018944224930414 + n * second for n in (1, 2, 4, 5)],
        "response_outputs": [grpc_output(2), grpc_output(2), grpc_output(3),
                             grpc_output(3, "stop")],
    }  # fmt: skip
    (request,) = read_export(made(tmp_path, entry))
    assert request.deliveries == (Delivery(1.0, 2), Delivery(4.0, 1))
    assert (request.tokens, request.prompt_tokens, request.ended) == (3, 5, 5.0)
    assert request.per_output_token == 3.0
    assert request.finished


def test_an_event_may_come_in_pieces_and_two_events_together(tmp_path: Path) -> None:
    events = "".join(f"data: {json.dumps(grpc_output(n, 'length' * (n == 3)))}\n\n"
                     for n in (1, 2, 3))  # fmt: skip
    cut = events.index("data", 10) + 7
    entry = {
        "timestamp": 0,
        "response_timestamps": [1, 2, 3],
        "response_outputs": [{"response": events[:cut]}, {"response": events[cut:]},
                             {"response": ""}],
    }  # fmt: skip
    (request,) = read_export(made(tmp_path, entry))
    assert [d.tokens for d in request.deliveries] == [1, 1, 1]
    assert [round(d.seconds * 1e9) for d in request.deliveries] == [1, 2, 2]
    assert request.finished
    entry["response_outputs"] = [{"response": events[:cut]}, {"response": ""}, {"response": ""}]
    with pytest.raises(ExportError, match="without its end"):
        read_export(made(tmp_path, entry))


def test_an_error_is_no_end(tmp_path: Path) -> None:
    error = {"response": 'data: {"error":"in ensemble"}\n\n'}
    entry = {"timestamp": 0, "response_timestamps": [1], "response_outputs": [error]}
    (request,) = read_export(made(tmp_path, entry))
    assert not request.finished
    assert (request.ttft, request.per_output_token, request.tokens) == (None, None, 0)
    assert figures.account_of([request]).failed == 1


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([grpc_output(2), grpc_output(1)], "n = 1"),
        ([grpc_output(1)], "2 timestamps for 1 responses"),
        ([grpc_output(1), {"num_output_tokens": 2}], "num_input_tokens"),
    ],
)
def test_what_is_no_export_is_named(tmp_path: Path, outputs: list[Any], reason: str) -> None:
    entry = {"timestamp": 0, "response_timestamps": [1, 2], "response_outputs": outputs}
    with pytest.raises(ExportError, match=f"x.export.json.*{reason}"):
        read_export(made(tmp_path, entry))
    (tmp_path / "x.export.json").write_text("{}")
    with pytest.raises(ExportError, match="experiments"):
        read_export(tmp_path / "x.export.json")


def test_the_servers_account_comes_from_its_metrics() -> None:
    account = figures.server_account(METRICS)
    assert account == figures.Account(7, 1, 2, 1500, 99)
    assert account.ended == 8
    assert account - account == figures.Account(0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="no pocket_requests_refused_total"):
        figures.server_account(METRICS.replace("refused", "x"))


def test_every_difference_is_told() -> None:
    good = figures.Account(8, 0, 0, 100, 50)
    assert figures.differences(good, good, 8) == []
    for changed, told in (
        ({"finished": 9}, "finished requests: the client has 8, the server counted 9"),
        ({"prompt_tokens": 101}, "prompt tokens"),
        ({"generated_tokens": 49}, "generated tokens"),
        ({"failed": 1}, "ended badly"),
        ({"refused": 1}, "ended badly"),
    ):
        (sentence,) = figures.differences(good, replace(good, **changed), 8)
        assert told in sentence
    assert "7 were asked for" in figures.differences(good, good, 7)[0]
    nothing = figures.Account(0, 0, 0, 0, 0)
    assert figures.differences(nothing, nothing, 0) == ["no token was generated"]


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [figures.percentile(values, share) for share in (0.01, 0.5, 0.95)] == [1.0, 3.0, 5.0]
    with pytest.raises(ValueError, match="no values"):
        figures.percentile([], 0.5)


def test_throughput_counts_the_whole_wall_time() -> None:
    requests = [
        AnalyzedRequest(0.0, 2.0, 4, (Delivery(1.0, 1), Delivery(2.0, 3)), "length"),
        AnalyzedRequest(1.0, 4.0, 4, (Delivery(3.0, 4),), "stop"),
    ]
    values = {r.metric: r.value for r in figures.to_records("grpc", 2, requests)}
    assert values["output_tokens_per_second"] == 2.0
    assert values["requests_per_second"] == 0.5
    assert values["inter_token_seconds_p50"] == 1.0
    assert values["time_per_output_token_seconds_p50"] == pytest.approx(1 / 3)


def test_inputs_are_a_function_of_the_seed() -> None:
    one, same, other = (input_data("grpc", random.Random(s), 6, 32) for s in ("a", "a", "b"))
    assert one == same != other
    entries = one["data"]
    assert isinstance(entries, list)
    assert len(entries) == 6
    assert all(1 <= entry["max_tokens"][0] <= 32 for entry in entries)
    bodies = input_data("http", random.Random("a"), 6, 32)["data"]
    assert isinstance(bodies, list)
    assert [[b["payload"][0]["text_input"]] for b in bodies] == [e["text_input"] for e in entries]


def test_an_analyzer_that_cannot_start_says_why(tmp_path: Path) -> None:
    program = tmp_path / "perf_analyzer"
    program.write_text(
        "#!/bin/sh\necho \"libc.so.6: version 'GLIBC_2.38' not found\" >&2\nexit 1\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(EngineFailure, match=r"GLIBC_2\.38"):
        install.check(program)
    with pytest.raises(EngineFailure, match="does not start"):
        install.check(tmp_path / "missing")
    program.write_text("#!/bin/sh\necho Perf Analyzer Version 2.51.0 >&2\n")
    assert install.check(program).version == "2.51.0"


@pytest.mark.parametrize("wrong", [["--concurrency", "0"], ["--concurrency", "64"],
                                   ["--protocols", "grpc,smtp"]])  # fmt: skip
def test_options_that_make_no_sense_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "fake", *wrong])
