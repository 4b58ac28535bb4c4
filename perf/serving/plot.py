"""The picture of a serving comparison; matplotlib is loaded only when one is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perf.bars import OURS
from perf.plot import logarithmic_values
from perf.records import Record, find
from perf.serving.figures import workload

_COLOURS = {OURS: "#c8371b", "vllm": "#2a9d5b", "llama.cpp": "#8a5fb5"}
_OTHER = "#444444"
_LATENCIES = (
    ("ttft_seconds_p95", "95 % of first tokens within, s"),
    ("per_output_token_seconds_p95", "95 % of requests: per token within, s"),
)


def points(
    records: Sequence[Record], engine: str, rates: Sequence[float], x: str, y: str
) -> list[tuple[float, float]]:
    """(figure ``x``, figure ``y``) of ``engine`` at each rate that has both, in order of rate."""
    found = []
    for rate in sorted(rates):
        pair = [find(records, engine=engine, workload=workload(rate), metric=m) for m in (x, y)]
        if all(pair):
            found.append((pair[0].value, pair[1].value))  # type: ignore[union-attr]
    return found


def plot_serving(
    path: Path, records: Sequence[Record], rates: Sequence[float], caption: str
) -> None:
    """Latencies over throughput (a point per rate, in order), and goodput over the rate.

    Raises:
        ImportError: matplotlib is not installed (``requirements/peers-plot.txt``).
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    engines = list(dict.fromkeys(record.engine for record in records))
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        picture, panels = plt.subplots(1, 3, figsize=(13.5, 4.8), layout="constrained")
        for engine in engines:
            look = {"marker": "o", "label": engine, "color": _COLOURS.get(engine, _OTHER)}
            for axes, (metric, _) in zip(panels, _LATENCIES, strict=False):
                line = points(records, engine, rates, "output_tokens_per_second", metric)
                axes.plot([a for a, _ in line], [b for _, b in line], **look)
            good = [
                (rate, record.value)
                for rate in sorted(rates)
                if (
                    record := find(
                        records,
                        engine=engine,
                        workload=workload(rate),
                        metric="goodput_requests_per_second",
                    )
                )
            ]
            panels[2].plot([rate for rate, _ in good], [value for _, value in good], **look)
        for axes, (_, title) in zip(panels, _LATENCIES, strict=False):
            axes.set_title(title, loc="left")
            axes.set_xlabel("generated tokens/s")
            logarithmic_values(axes)
        top = max(rates)
        panels[2].plot([0, top], [0, top], ":", color="#aaaaaa", label="all requests")
        panels[2].set_title("Goodput, requests/s", loc="left")
        panels[2].set_xlabel("offered requests/s")
        for axes in panels:
            axes.grid(alpha=0.3)
        handles, labels = panels[2].get_legend_handles_labels()
        picture.legend(
            handles, labels, loc="outside upper center", ncols=len(labels), frameon=False
        )
        picture.supxlabel(caption, fontsize=7.5, color="#555555")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=130)
        plt.close(picture)
