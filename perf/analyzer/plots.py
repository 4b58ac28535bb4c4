"""The picture of a sweep: ``python -m perf.analyzer.plots RECORDS.json PICTURE.png CAPTION``.

Runs in the interpreter that has matplotlib, which is not the project's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf.records import Record, read_records

_COLOURS = {"grpc": "#c8371b", "http": "#1f77b4"}
_OTHER = "#444444"
_PANELS = (
    (
        "Time to first token, ms",
        1e3,
        (("ttft_seconds_p50", "-", "p50"), ("ttft_seconds_p95", "--", "p95")),
    ),
    (
        "Between deliveries, ms",
        1e3,
        (("inter_token_seconds_p50", "-", "p50"), ("inter_token_seconds_p99", "--", "p99")),
    ),
    ("Generated tokens/s", 1.0, (("output_tokens_per_second", "-", ""),)),
)


def points(records: Sequence[Record], protocol: str, metric: str) -> list[tuple[int, float]]:
    """(concurrency, value), ascending."""
    return sorted(
        (record.concurrency, record.value)
        for record in records
        if (record.workload, record.metric) == (protocol, metric)
    )


def plot_sweep(path: Path, records: Sequence[Record], caption: str) -> None:
    """Three panels over concurrency, a colour per protocol.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    protocols = list(dict.fromkeys(record.workload for record in records))
    ticks = sorted({record.concurrency for record in records})
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        picture, panels = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
        for axes, (title, scale, lines) in zip(panels, _PANELS, strict=True):
            for protocol in protocols:
                for metric, dashes, label in lines:
                    _line(axes, points(records, protocol, metric), scale, protocol, dashes, label)
            axes.set_title(title, loc="left")
            axes.set_xlabel("concurrent requests")
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", alpha=0.3)
            axes.legend(frameon=False, fontsize=8.5)
        picture.supxlabel(caption, fontsize=7.5, color="#555555")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=130)
        plt.close(picture)


def _line(
    axes: Any,
    found: Sequence[tuple[int, float]],
    scale: float,
    protocol: str,
    dashes: str,
    label: str,
) -> None:
    axes.plot(
        [x for x, _ in found],
        [y * scale for _, y in found],
        dashes,
        marker="o",
        markersize=4.5,
        color=_COLOURS.get(protocol, _OTHER),
        label=f"{protocol} {label}".strip(),
    )


if __name__ == "__main__":
    source, picture_path, text = sys.argv[1:]
    plot_sweep(Path(picture_path), read_records(Path(source)), text)
