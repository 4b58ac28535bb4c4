"""Writes the tables of docs/metrics.md: `python tools/write_metrics_reference.py`.

The server's metrics come from pocket_backend/observability/names.py, the gateway's from its own
registry. A test fails while the page differs.
"""

from __future__ import annotations

import re
from pathlib import Path

from pocket_backend.observability.names import METRICS, Metric
from pocket_client.gateway.metrics import Metrics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"


def server_table() -> str:
    rows = ["| Metric | Type | Labels | Meaning | vLLM's |", "|---|---|---|---|---|"]
    rows += [
        f"| `{metric.name}` | {_kind(metric)} | {_labels(metric)} | {metric.help} | "
        f"{', '.join(f'`{name}`' for name in metric.vllm.split(', ') if name)} |"
        for metric in METRICS
    ]
    return "\n".join(rows)


def bucket_table() -> str:
    by_buckets: dict[tuple[float, ...], list[str]] = {}
    for metric in METRICS:
        if metric.buckets:
            by_buckets.setdefault(metric.buckets, []).append(f"`{metric.name}`")
    rows = ["| Histograms | Upper bounds |", "|---|---|"]
    rows += [
        f"| {', '.join(found)} | {' '.join(f'{bound:g}' for bound in buckets)} |"
        for buckets, found in by_buckets.items()
    ]
    return "\n".join(rows)


def gateway_table() -> str:
    rows = ["| Metric | Type | Meaning |", "|---|---|---|"]
    for family in Metrics().registry.collect():
        suffix = "_total" if family.type == "counter" else ""
        rows.append(f"| `{family.name}{suffix}` | {family.type} | {family.documentation} |")
    return "\n".join(rows)


def render(page: str) -> str:
    """``page`` with its tables replaced by current ones."""
    tables = {"server": server_table(), "buckets": bucket_table(), "gateway": gateway_table()}
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
        page, count = pattern.subn(lambda _, t=f"{begin}\n{table}\n{end}": t, page)
        if count != 1:
            raise SystemExit(f"{PAGE.name}: one section {begin} ... {end} is needed, found {count}")
    return page


def _kind(metric: Metric) -> str:
    return f"{metric.kind} (batched)" if metric.batched else metric.kind


def _labels(metric: Metric) -> str:
    if not metric.label_values:
        return ", ".join(f"`{label}`" for label in metric.labels)
    return "; ".join(
        f"`{label}`: {', '.join(values)}"
        for label, values in zip(metric.labels, metric.label_values, strict=True)
    )


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
