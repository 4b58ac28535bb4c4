"""Writes deploy/grafana/dashboards/*.json: `python tools/write_dashboards.py`.

A panel is a line of the tables below, so that a review reads queries and not JSON. A test fails
while the files differ, if a query names a metric that does not exist, or if one is not PromQL.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_WHERE = 'instance=~"$instance"'


@dataclass(frozen=True)
class Panel:
    """One graph (``queries``: legend to PromQL) or, with ``kind`` ``stat``, one number."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    about: str = ""
    threshold: float | None = None
    """Above this a value is drawn red: the objective."""
    stacked: bool = False


def rate(metric: str, by: str = "", where: str = "") -> str:
    selector = ", ".join(part for part in (_WHERE, where) if part)
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{{{selector}}}[$__rate_interval]))"


def quantiles(metric: str, *qs: float) -> dict[str, str]:
    return {
        f"p{q * 100:g}": f"histogram_quantile({q}, {rate(metric + '_bucket', 'le')})" for q in qs
    }


def value(metric: str, by: str = "", where: str = "") -> str:
    selector = ", ".join(part for part in (_WHERE, where) if part)
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({metric}{{{selector}}})"


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


_TTFT = "pocket_ttft_seconds"
_ITL = "pocket_inter_token_latency_seconds"
_TTFT_MET = ratio(rate(_TTFT + "_bucket", where='le="2.5"'), rate(_TTFT + "_count"))
_ITL_MET = ratio(rate(_ITL + "_bucket", where='le="0.1"'), rate(_ITL + "_count"))
_GENERATED = rate("pocket_tokens_total", where='type="generated"')

SERVER: dict[str, list[Panel]] = {
    "Objectives": [
        Panel(
            "First tokens within 2.5 s (goal 95 %)", {"met": _TTFT_MET}, "percentunit", "stat", 6
        ),
        Panel(
            "Following tokens within 0.1 s (goal 99 %)", {"met": _ITL_MET}, "percentunit", "stat", 6
        ),
        Panel(
            "Requests that fail",
            {"failed": ratio(rate("pocket_requests_failed_total"), rate("pocket_requests_total"))},
            "percentunit",
            "stat",
            6,
            threshold=0.05,
        ),
        Panel("Generated tokens per second", {"tokens": _GENERATED}, "short", "stat", 6),
    ],
    "Traffic": [
        Panel(
            "Finished requests per second",
            {"{{reason}}": rate("pocket_requests_total", "reason")},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Refused, cancelled, failed",
            {
                "refused: {{reason}}": rate("pocket_requests_refused_total", "reason"),
                "cancelled: {{reason}}": rate("pocket_requests_cancelled_total", "reason"),
                "failed: {{reason}}": rate("pocket_requests_failed_total", "reason"),
            },
            "reqps",
        ),
        Panel("Tokens per second", {"{{type}}": rate("pocket_tokens_total", "type")}),
        Panel(
            "Requests",
            {
                "running": value("pocket_requests_running"),
                "waiting": value("pocket_requests_waiting"),
            },
            stacked=True,
        ),
        Panel("Prompt tokens per request", quantiles("pocket_request_prompt_tokens", 0.5, 0.95)),
        Panel(
            "Generated tokens per request", quantiles("pocket_request_generated_tokens", 0.5, 0.95)
        ),
    ],
    "Latency": [
        Panel("Time to first token", quantiles(_TTFT, 0.5, 0.95, 0.99), "s", threshold=2.5),
        Panel("Between tokens", quantiles(_ITL, 0.5, 0.95, 0.99), "s", threshold=0.1),
        Panel("Whole request", quantiles("pocket_request_duration_seconds", 0.5, 0.95, 0.99), "s"),
        Panel("Queue", quantiles("pocket_request_queue_time_seconds", 0.5, 0.95), "s"),
        Panel("Prefill", quantiles("pocket_request_prefill_time_seconds", 0.5, 0.95), "s"),
        Panel("Decode", quantiles("pocket_request_decode_time_seconds", 0.5, 0.95), "s"),
    ],
    "Engine": [
        Panel("Time of a step", quantiles("pocket_step_seconds", 0.5, 0.95, 0.99), "s"),
        Panel(
            "Mean per step",
            {
                "sequences": ratio(rate("pocket_batch_size_sum"), rate("pocket_batch_size_count")),
                "tokens": ratio(rate("pocket_step_tokens_sum"), rate("pocket_step_tokens_count")),
            },
        ),
        Panel(
            "Share of time in steps",
            {"busy": rate("pocket_step_seconds_sum", "instance")},
            "percentunit",
            about="Near 100 % the engine is saturated; more requests only wait.",
        ),
        Panel("KV blocks", {"{{state}}": value("pocket_kv_blocks", "state")}, stacked=True),
        Panel(
            "Prefix cache hit rate",
            {
                "tokens": ratio(
                    rate("pocket_prefix_cache_hits_total"),
                    rate("pocket_prefix_cache_queries_total"),
                )
            },
            "percentunit",
        ),
        Panel(
            "Trouble per second",
            {
                "preemptions": rate("pocket_preemptions_total"),
                "failed steps": rate("pocket_steps_total", where='result="failed"'),
                "stalls": rate("pocket_stalls_total"),
                "integrity failures": rate("pocket_integrity_failures_total"),
            },
        ),
        Panel(
            "Saved states",
            {"{{state}}": value("pocket_state_snapshots", "state")},
            stacked=True,
            about="Of models with recurrent layers; others have none.",
        ),
        Panel(
            "Saved states per second",
            {
                "saved": rate("pocket_state_snapshot_saves_total"),
                "resumed from": rate("pocket_state_snapshot_hits_total"),
                "given up ({{reason}})": rate("pocket_state_snapshot_evictions_total", "reason"),
            },
        ),
    ],
}

_GATEWAY_REQUESTS = "pocketllm_gateway_requests_total"
GATEWAY: dict[str, list[Panel]] = {
    "Clients": [
        Panel(
            "Answers per second",
            {"{{status}}": rate(_GATEWAY_REQUESTS, "status")},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Server errors",
            {"5xx": ratio(rate(_GATEWAY_REQUESTS, where='status=~"5.."'), rate(_GATEWAY_REQUESTS))},
            "percentunit",
            threshold=0.05,
        ),
        Panel("In flight", {"generations": value("pocketllm_gateway_generations_in_flight")}),
        Panel(
            "Time to first token",
            quantiles("pocketllm_gateway_time_to_first_token_seconds", 0.5, 0.95, 0.99),
            "s",
        ),
        Panel("Whole answer", quantiles("pocketllm_gateway_request_seconds", 0.5, 0.95, 0.99), "s"),
        Panel(
            "Ended badly per second",
            {
                "clients that left": rate("pocketllm_gateway_client_disconnects_total"),
                "broken streams": rate("pocketllm_gateway_stream_errors_total"),
            },
        ),
        Panel(
            "Tokens per second",
            {
                "prompt": rate("pocketllm_gateway_prompt_tokens_total"),
                "generated": rate("pocketllm_gateway_completion_tokens_total"),
            },
            width=24,
        ),
    ],
}


def dashboard(uid: str, title: str, up_job: str, rows: dict[str, list[Panel]]) -> dict[str, object]:
    """Rows of panels from left to right, wrapped where they do not fit."""
    panels: list[dict[str, object]] = []
    y = 0
    for row, members in rows.items():
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": row, "collapsed": False, "panels": [],
             "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1}}
        )  # fmt: skip
        y += 1
        x = 0
        height = 8
        for panel in members:
            height = 5 if panel.kind == "stat" else 8
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            panels.append(_panel(len(panels) + 1, panel, x, y, height))
            x += panel.width
        y += height
    return {
        "uid": uid,
        "title": title,
        "tags": ["pocketllm"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(up_job)},
        "panels": panels,
    }


def _panel(number: int, panel: Panel, x: int, y: int, height: int) -> dict[str, object]:
    steps: list[dict[str, object]] = [{"color": "green", "value": None}]
    if panel.threshold is not None:
        steps.append({"color": "red", "value": panel.threshold})
    custom: dict[str, object] = {}
    if panel.kind == "timeseries":
        custom = {
            "fillOpacity": 30 if panel.stacked else 8,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "off" if panel.threshold is None else "line"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": custom,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _DATASOURCE, "expr": expr,
             "legendFormat": legend}
            for index, (legend, expr) in enumerate(panel.queries.items())
        ],
    }  # fmt: skip


def _variables(up_job: str) -> list[dict[str, object]]:
    query = f'label_values(up{{job="{up_job}"}}, instance)'
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "instance",
            "type": "query",
            "label": "Instance",
            "datasource": _DATASOURCE,
            "query": {"query": query, "refId": "instance"},
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
        },
    ]


def files() -> dict[Path, str]:
    """Every dashboard file and what it should hold."""
    dashboards = (
        dashboard("pocketllm-server", "PocketLLM server", "pocketllm", SERVER),
        dashboard("pocketllm-gateway", "PocketLLM gateway", "pocketllm-gateway", GATEWAY),
    )
    return {
        FOLDER / f"{board['uid']}.json": json.dumps(board, indent=1) + "\n" for board in dashboards
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
