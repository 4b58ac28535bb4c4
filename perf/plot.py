"""The picture of a comparison; matplotlib is loaded only here, and only when a plot is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perf.bars import OURS, OURS_UNCACHED
from perf.records import Record, figure, find

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    OURS: "#c8371b",
    "openvino": "#1f77b4",
    "vllm": "#2a9d5b",
    "llama.cpp Q4_0": "#8a5fb5",
    "llama.cpp Q4_1": "#b9a2d0",
    "transformers": "#9a9a9a",
}
_OTHER_COLOUR = "#444444"
_GROUP_WIDTH = 0.84
_LABEL_SPACING = 0.033
"""Of the height of the axes: one line of the labels' type."""
_CAPTION_COLOUR = "#555555"


def plot_comparison(path: Path, records: Sequence[Record], caption: str) -> None:
    """Three panels: decode over concurrency, prefill and shared prefix as bars.

    Raises:
        ImportError: matplotlib is not installed (``requirements/peers-plot.txt``).
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    present = {record.engine for record in records} - {OURS_UNCACHED}
    engines = [name for name in _COLOURS if name in present]
    engines += sorted(present - set(engines))
    style = {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        picture, panels = plt.subplots(1, 3, figsize=(13.5, 5), layout="constrained")
        _lines(panels[0], records, engines)
        _bars(panels[1], records, engines, {"B1024": "1,024 tokens", "B4096": "4,096 tokens"})
        panels[1].set_title("Prefill: prompt tokens/s", loc="left")
        _bars(panels[2], records, engines, {"C cold": "cold", "C warm": "warm"}, logarithmic=True)
        panels[2].set_title("Shared prefix: seconds (lower is better)", loc="left")
        handles, labels = panels[0].get_legend_handles_labels()
        picture.legend(
            handles, labels, loc="outside upper center", ncols=len(labels), frameon=False
        )
        picture.supxlabel(caption, fontsize=7.5, color=_CAPTION_COLOUR)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=130)
        plt.close(picture)


def _lines(axes: Axes, records: Sequence[Record], engines: Sequence[str]) -> None:
    axes.set_title("Decode: generated tokens/s, all requests together", loc="left")
    ticks: set[int] = set()
    ends: list[tuple[float, int, str]] = []
    for engine in engines:
        points = sorted(
            (record.concurrency, record.value)
            for record in records
            if record.engine == engine and record.metric == "decode_tokens_per_second"
        )
        ticks |= {concurrency for concurrency, _ in points}
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="o",
            markersize=5,
            linewidth=2.6 if engine == OURS else 1.5,
            color=_COLOURS.get(engine, _OTHER_COLOUR),
            label=engine,
            zorder=3 if engine == OURS else 2,
        )
        if points:
            ends.append((points[-1][1], points[-1][0], engine))
    axes.set_ylim(bottom=0)
    _label_ends(axes, ends)
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
        axes.set_xlim(min(ticks) * 0.85, max(ticks) * 1.5)
    axes.set_xlabel("concurrent requests")
    axes.grid(axis="y", alpha=0.3)


def _label_ends(axes: Axes, ends: Sequence[tuple[float, int, str]]) -> None:
    """Write the last value behind each line, moved up where it would cover the one below."""
    spacing = axes.get_ylim()[1] * _LABEL_SPACING
    lowest = 0.0
    for value, concurrency, engine in sorted(ends):
        height = max(value, lowest)
        lowest = height + spacing
        axes.annotate(
            figure(value),
            (concurrency, height),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_COLOURS.get(engine, _OTHER_COLOUR),
        )


def _bars(
    axes: Axes,
    records: Sequence[Record],
    engines: Sequence[str],
    groups: dict[str, str],
    *,
    logarithmic: bool = False,
) -> None:
    width = _GROUP_WIDTH / max(len(engines), 1)
    for index, engine in enumerate(engines):
        found = [find(records, engine=engine, workload=workload) for workload in groups]
        bars = [
            (group + (index + 0.5) * width - _GROUP_WIDTH / 2, record.value)
            for group, record in enumerate(found)
            if record is not None
        ]
        drawn = axes.bar(
            [x for x, _ in bars],
            [value for _, value in bars],
            width * 0.92,
            color=_COLOURS.get(engine, _OTHER_COLOUR),
        )
        axes.bar_label(drawn, [figure(value) for _, value in bars], fontsize=6.8, padding=2)
    axes.set_xticks(range(len(groups)), list(groups.values()))
    axes.tick_params(axis="x", length=0)
    if logarithmic and axes.patches:
        logarithmic_values(axes)
    axes.margins(y=0.1)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def logarithmic_values(axes: Axes) -> None:
    """A logarithmic axis of values whose ticks say what a person would: 0.5, 1, 2."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    # 1, 2 and 5 of a decade carry numbers; all nine would run into each other.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
