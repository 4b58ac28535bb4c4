"""Rules and dashboards under deploy/: current, valid, and about metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_server import DEPLOY, tool
from tool_scripts import load_tool

from pocket_backend.observability.names import METRICS
from pocket_client.gateway.metrics import Metrics

RULES = DEPLOY / "prometheus" / "rules"
WORD = re.compile(r"\bpocket(?:llm_gateway)?_\w+\b(?!:)")


def exported_series() -> dict[str, frozenset[str]]:
    """Every series name, with the labels that it has."""
    found = {}
    for metric in METRICS:
        if metric.kind == "histogram":
            found[metric.name + "_bucket"] = frozenset({"le"})
            found[metric.name + "_count"] = found[metric.name + "_sum"] = frozenset()
        else:
            found[metric.name] = frozenset(metric.labels)
    for collector in set(Metrics().registry._names_to_collectors.values()):
        labels = frozenset(collector._labelnames)
        for family in collector.describe():
            if family.type == "histogram":
                found[family.name + "_bucket"] = labels | {"le"}
                found[family.name + "_count"] = found[family.name + "_sum"] = labels
            else:
                found[family.name + ("_total" if family.type == "counter" else "")] = labels
    return found


def rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_queries() -> list[str]:
    return [
        target["expr"]
        for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


def test_every_expression_is_about_series_that_exist() -> None:
    series = exported_series()
    recorded = {rule["record"] for rule in rules("recording.yml")}
    expressions = [rule["expr"] for rule in rules("recording.yml") + rules("alerts.yml")]
    expressions += dashboard_queries()
    assert len(expressions) > 60
    for expression in expressions:
        for name in re.findall(r"\b\w+:\w+:\w+\b", expression):
            assert name in recorded, name
        plain = re.sub(r"\b\w+:\w+:\w+\b", "", expression)
        for name in WORD.findall(plain):
            if not name.startswith("pocketllm-"):
                assert name in series, f"{name} in {expression}"
        for name, selector in re.findall(r"(pocket\w+)\{([^}]*)\}", plain):
            used = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector)) - {"instance", "job"}
            assert used <= series[name], f"{used} of {name} in {expression}"


def test_objectives_are_bucket_bounds() -> None:
    by_name = {metric.name: metric for metric in METRICS}
    expressions = [rule["expr"] for rule in rules("recording.yml")] + dashboard_queries()
    found = [
        pair
        for text in expressions
        for pair in re.findall(r'(\w+)_bucket\{[^}]*le="([^"]+)"', text)
    ]
    assert len(found) >= 6
    for name, bound in found:
        assert float(bound) in by_name[name].buckets
        assert not float(bound).is_integer(), "Prometheus 3 writes whole bounds another way"


def test_alerts_say_what_to_do_and_are_tested() -> None:
    tests = (DEPLOY / "prometheus" / "tests" / "rules_test.yml").read_text()
    for rule in rules("alerts.yml"):
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["alert"] in tests, "no unit test fires this alert"


def test_dashboards_are_current_and_well_laid_out() -> None:
    for path, text in load_tool("write_dashboards").files().items():
        assert path.read_text() == text, "run: python tools/write_dashboards.py"
        board = json.loads(text)
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        assert {v["name"] for v in board["templating"]["list"]} == {"datasource", "instance"}


def test_promtool_accepts_configuration_and_rules() -> None:
    promtool = tool("promtool")
    for command in (
        ["check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")],
        ["test", "rules", str(DEPLOY / "prometheus" / "tests" / "rules_test.yml")],
    ):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_queries_are_promql(tmp_path: Path) -> None:
    """As rules, since promtool checks those; Grafana's variables get values first."""
    promtool = tool("promtool")
    group = [
        {"record": f"query:{index}", "expr": text.replace("$__rate_interval", "1m")}
        for index, text in enumerate(dashboard_queries())
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": group}]}))
    command = [promtool, "check", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", sorted((DEPLOY / "grafana" / "provisioning").glob("*/*.yml")))
def test_grafana_provisioning_is_valid(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    assert content["apiVersion"] == 1
    (entry,) = content["datasources" if "datasources" in content else "providers"]
    assert {"name", "type"} <= set(entry)
