"""Records survive their file, and tables show what they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf.records import (
    Record,
    figure,
    find,
    markdown_table,
    read_records,
    text_table,
    write_records,
)
from perf.records import records_table as table_of


def _record(workload: str = "A8", metric: str = "decode_tokens_per_second") -> Record:
    return Record.of("compare", "vllm", workload, 8, metric, "tokens/s", [3.0, 1.0, 2.0])


def test_value_is_the_median_and_samples_keep_their_order() -> None:
    record = _record()
    assert record.value == 2.0
    assert record.samples == (3.0, 1.0, 2.0)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="A8"):
        Record.of("compare", "vllm", "A8", 8, "m", "s", [])


def test_file_round_trip(tmp_path: Path) -> None:
    records = [_record(), _record("B1024", "prefill_tokens_per_second")]
    path = tmp_path / "new folder" / "run.json"
    write_records(path, records)
    assert read_records(path) == records


def test_file_is_a_list_of_objects_with_the_agreed_fields(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_records(path, [_record()])
    (entry,) = json.loads(path.read_text())
    expected = ["bench", "engine", "workload", "concurrency", "metric", "value", "unit", "samples"]
    assert list(entry) == expected


def test_empty_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_records(path, [])
    assert read_records(path) == []


@pytest.mark.parametrize("content", ['{"bench": 1}', '[{"bench": "x"}]', "[3]"])
def test_other_json_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"run\.json"):
        read_records(path)


def test_find_distinguishes_metrics() -> None:
    records = [_record(), _record(metric="ttft_seconds")]
    assert find(records, engine="vllm", workload="A8", metric="ttft_seconds") is records[1]
    assert find(records, engine="vllm", workload="A8") is records[0]
    assert find(records, engine="openvino", workload="A8") is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (12345.6, "12,346"), (534.4, "534"), (6.934, "6.93"), (0.0123, "0.0123")],
)
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_tables() -> None:
    header, rows = ("workload", "x"), [("A1", "1,234"), ("longer name", "2")]
    lines = text_table(header, rows).splitlines()
    assert lines[2].endswith("1,234")
    assert len({len(line) for line in lines}) == 1
    assert markdown_table(header, rows).splitlines()[1] == "| --- | --: |"
    assert "1 .. 3" in table_of([_record()])
