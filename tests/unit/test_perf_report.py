"""The documentation's sections are rewritten between their markers and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.report import replace_section, update_section

_ROOT = Path(__file__).resolve().parents[2]
_TEXT = "# Title\n\n<!-- begin one -->\nold\n<!-- end one -->\n\nhand-written\n"


def test_only_the_section_changes_and_twice_is_once() -> None:
    once = replace_section(_TEXT, "one", "new\n")
    assert once == _TEXT.replace("\nold\n", "\n\nnew\n\n")
    assert replace_section(once, "one", "new") == once


@pytest.mark.parametrize("text", ["nothing", "<!-- end one --> <!-- begin one -->"])
def test_missing_markers_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="begin one"):
        replace_section(text, "one", "x")


def test_section_holds_tables_image_and_facts(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text(_TEXT)
    tables = [(("workload", "x"), [("A1", "2")]), (("unused",), [])]
    update_section(document, "one", tables, "facts", ("assets/x.png", "a plot"))
    text = document.read_text()
    assert "| A1 | 2 |" in text
    assert "![a plot](assets/x.png)" in text
    assert "unused" not in text
    assert text.index("facts") < text.index("<!-- end one -->")


@pytest.mark.parametrize("name", ["compare", "bench_engine", "bench_triton"])
def test_the_documentation_has_the_sections(name: str) -> None:
    text = (_ROOT / "docs" / "benchmarks.md").read_text()
    assert "body" in replace_section(text, name, "body")


@pytest.mark.parametrize("families", ["A", "B", "C", "ABC"])
def test_plot_is_drawn_from_whatever_was_measured(tmp_path: Path, families: str) -> None:
    pytest.importorskip("matplotlib")
    from perf.plot import plot_comparison
    from perf.records import Record

    def record(engine: str, workload: str, concurrency: int, metric: str) -> Record:
        return Record("compare", engine, workload, concurrency, metric, 10.0, "", (10.0,))

    records = [
        record("pocketllm", "A1", 1, "decode_tokens_per_second"),
        record("pocketllm", "A8", 8, "decode_tokens_per_second"),
        record("somebody", "B1024", 1, "prefill_tokens_per_second"),
        record("vllm", "C cold", 16, "wall_seconds"),
    ]
    records = [item for item in records if item.workload[0] in families]
    path = tmp_path / "new" / "plot.png"
    plot_comparison(path, records, "caption")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_ticks_of_a_logarithmic_axis_are_plain_numbers() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from perf.plot import logarithmic_values

    figure = Figure()
    axes = figure.subplots()
    axes.bar([0, 1], [1.3, 22])
    logarithmic_values(axes)
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    shown = [
        text.get_text()
        for text in axes.get_yticklabels(which="both")
        if text.get_text() and low <= text.get_position()[1] <= high
    ]
    assert {"2", "5", "10", "20"} <= set(shown) <= {"0.5", "1", "2", "5", "10", "20", "50"}
