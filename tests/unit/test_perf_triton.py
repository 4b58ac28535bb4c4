"""``perf.bench_triton``: its tables and bar, and what its client makes of a stream."""

from __future__ import annotations

import struct

import pytest
from tritonclient.grpc import service_pb2

from perf import bench_triton
from perf.bench_triton import METRIC, THROUGH_TRITON
from perf.engines.base import EngineFailure, EngineOptions
from perf.engines.triton import greedy_request, request_times, server_environment
from perf.records import Record
from pocket_backend.triton.settings import engine_args


def speeds(streams: int, inside: list[float], through: list[float]) -> list[Record]:
    return [
        Record.of("bench_triton", engine, f"A{streams}", streams, METRIC, "tokens/s", samples)
        for engine, samples in ((bench_triton.OURS, inside), (THROUGH_TRITON, through))
    ]


def test_ratio_is_that_of_the_medians_and_its_spread_that_of_the_rounds() -> None:
    records = speeds(8, [100.0, 200.0, 120.0], [90.0, 90.0, 108.0])
    assert bench_triton.throughput_rows(records) == [
        ("8", "120", "90", "75.0%", "45.0% .. 90.0%", "85%", "FAIL")
    ]
    assert bench_triton.passed(records) is False


def test_only_eight_streams_are_judged_and_exactly_the_bar_passes() -> None:
    records = speeds(1, [100.0], [10.0]) + speeds(8, [100.0], [85.0])
    assert [row[-2:] for row in bench_triton.throughput_rows(records)] == [
        ("-", "-"),
        ("85%", "pass"),
    ]
    assert bench_triton.passed(records) is True
    assert bench_triton.passed(speeds(1, [100.0], [10.0])) is None


def test_cpu_seconds_stand_beside_by_process() -> None:
    records = speeds(8, [100.0], [85.0])
    for engine, metric, value in (
        (bench_triton.OURS, "cpu_seconds", 3.0),
        (THROUGH_TRITON, "cpu_seconds", 4.0),
        (THROUGH_TRITON, "client_cpu_seconds", 0.5),
    ):
        records.append(Record.of("bench_triton", engine, "A8", 8, metric, "s", [value]))
    ((*known, tokenizer, _, _),) = bench_triton.cpu_rows(records)
    assert known == ["8", "3", "4", "0.5", "-"]
    assert tokenizer == "-"


def response(tokens: list[int], reason: str = "", error: str = "") -> object:
    """One ``ModelStreamInferResponse`` of the ensemble."""
    made = service_pb2.ModelStreamInferResponse(error_message=error)
    text = struct.pack("<I", len(reason)) + reason.encode()
    for name, kind, raw in (
        ("text_output", "BYTES", struct.pack("<I", 0)),
        ("token_ids", "INT32", struct.pack(f"<{len(tokens)}i", *tokens)),
        ("finish_reason", "BYTES", text),
        ("stop_reason", "BYTES", struct.pack("<I", 0)),
        *((f"num_{what}_tokens", "UINT32", bytes(4)) for what in ("input", "output", "cached")),
    ):
        made.infer_response.outputs.add(name=name, datatype=kind, shape=[1])
        made.infer_response.raw_output_contents.append(raw)
    return made


def test_first_token_and_end_are_those_of_the_chunks() -> None:
    request = greedy_request([1, 2], 3)
    arrivals = [
        (0.1, response([])),  # no token yet, only part of a character
        (0.2, response([7])),
        (0.3, response([8, 9], "length")),
        (0.9, service_pb2.ModelStreamInferResponse()),  # the final flag ends no token
    ]
    times = request_times(arrivals, request)
    assert times.token_ids == (7, 8, 9)
    assert (times.first_token_seconds, times.finished_seconds) == (0.2, 0.3)


def test_an_error_or_a_missing_end_is_a_failure() -> None:
    request = greedy_request([1], 2)
    with pytest.raises(EngineFailure, match="shutting down"):
        request_times([(0.1, response([], error="the server is shutting down"))], request)
    with pytest.raises(EngineFailure, match="after 1 tokens"):
        request_times([(0.1, response([7]))], request)


def test_the_server_gets_the_settings_of_the_engine_in_process() -> None:
    options = EngineOptions(
        "m.gguf", threads=3, max_sequences=5, prefix_caching=False, extra={"backend": "cpp"}
    )
    args = engine_args({"POCKETLLM_MODEL": options.model, **server_environment(options)})
    assert (args.threads, args.max_batch_size, args.backend) == (3, 5, "cpp")
    assert (args.max_model_len, args.kv_cache_tokens) == (4608, 40960)
    assert args.enable_prefix_caching is False


def test_a_greedy_request_ends_at_its_length_only() -> None:
    request = greedy_request([5, 6], 128)
    assert request.input_ids == (5, 6)
    assert request.stream
    wanted = {"max_tokens": 128, "temperature": 0.0, "ignore_eos": True}
    assert dict(request.parameters) == wanted
