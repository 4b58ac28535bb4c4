"""The plot of a simulation; matplotlib is loaded only here, and only when a plot is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perf.simulation.summary import Objective, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#c8371b", "#1f77b4", "#2a9d5b", "#8a5fb5", "#b8860b", "#444444")
_DASHES = ("solid", "dashed", "dotted", "dashdot")
_POINTS = 400


def plot(path: Path, summaries: Sequence[Summary], objective: Objective, caption: str) -> None:
    """TTFT and inter-token times as "how many took longer", and TTFT by kind of request.

    Raises:
        ImportError: matplotlib is not installed (``requirements/peers-plot.txt``).
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    style = {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        picture, (first, gaps, kinds) = plt.subplots(
            1, 3, figsize=(13.5, 4.8), layout="constrained"
        )
        for index, summary in enumerate(summaries):
            look = {
                "color": _COLOURS[index % len(_COLOURS)],
                "linestyle": _DASHES[index % len(_DASHES)],
                "linewidth": 2.0,
            }
            _exceedance(first, summary.ttft, np.ones(len(summary.ttft)), summary.variant, look)
            _exceedance(gaps, summary.gap_seconds, summary.gap_counts, summary.variant, look)
        for axes, title, limit in (
            (first, "Time to first token: share that took longer", objective.ttft),
            (gaps, "Between two tokens: share that took longer", objective.per_token),
        ):
            axes.set_title(title, loc="left")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_ylim(5e-4, 1.1)
            axes.axvline(limit, color="#999999", linewidth=1, linestyle=(0, (1, 2)))
            axes.annotate(
                "SLO", (limit, 1.0), xytext=(3, -2), textcoords="offset points", fontsize=8,
                color="#777777", va="top",
            )  # fmt: skip
            axes.set_xlabel("seconds")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:g} %")
            axes.grid(alpha=0.3)
        _kinds(kinds, summaries)
        handles, labels = first.get_legend_handles_labels()
        picture.legend(
            handles, labels, loc="outside upper center", ncols=min(len(labels), 4), frameon=False
        )
        picture.supxlabel(caption, fontsize=7.5, color="#555555")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=130)
        plt.close(picture)


def _exceedance(
    axes: Axes, ordered: np.ndarray, counts: np.ndarray, label: str, look: dict[str, object]
) -> None:
    if not len(ordered):
        return
    ends = np.cumsum(counts)
    longer = 1.0 - ends / ends[-1]
    # As many points as the eye can tell apart, evenly along the logarithmic axis.
    levels = np.geomspace(1.0, 2e-4, _POINTS)
    places = np.unique(np.searchsorted(-longer, -levels).clip(0, len(ordered) - 1))
    axes.plot(ordered[places], longer[places].clip(1e-6), label=label, **look)  # type: ignore[arg-type]


def _kinds(axes: Axes, summaries: Sequence[Summary]) -> None:
    kinds = sorted({kind for s in summaries for kind in s.ttft_by_kind})
    width = 0.8 / max(1, len(summaries))
    for index, summary in enumerate(summaries):
        offset = (index + 0.5) * width - 0.4
        present = [(i, kind) for i, kind in enumerate(kinds) if kind in summary.ttft_by_kind]
        middle = [summary.ttft_at(0.5, kind) for _, kind in present]
        high = [summary.ttft_at(0.99, kind) for _, kind in present]
        places = [i + offset for i, _ in present]
        colour = _COLOURS[index % len(_COLOURS)]
        axes.bar(places, high, width * 0.9, color=colour, alpha=0.35)
        axes.bar(places, middle, width * 0.9, color=colour)
    axes.set_title("Time to first token by kind: p50 (solid), p99 (pale)", loc="left")
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(range(len(kinds)), [kind or "all" for kind in kinds])
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
