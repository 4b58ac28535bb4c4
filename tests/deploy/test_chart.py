"""The chart's files: current, valid for the API, and complete."""

from __future__ import annotations

import copy
import json
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml
from chart import (
    CHART,
    CUSTOM_GROUPS,
    KUBERNETES,
    RENDERED,
    SETS,
    one,
    render_chart,
    rendered,
    validate,
)
from tool_scripts import load_tool

chart_files = load_tool("write_chart_files")


def values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_rendered_manifests_belong_to_this_chart() -> None:
    current = (RENDERED / "INPUTS").read_text().strip()
    assert current == render_chart.inputs_hash(), "run `make chart` and commit what it changes"
    assert {path.stem for path in RENDERED.glob("*.yaml")} == set(SETS)


@pytest.mark.parametrize("name", SETS)
def test_the_api_server_would_take_them(name: str) -> None:
    manifests = rendered(name)
    validate(manifests, *KUBERNETES[name])
    kinds = {item["kind"] for item in manifests}
    assert {"Deployment", "Service", "ServiceAccount", "NetworkPolicy"} <= kinds
    names = [(item["kind"], item["metadata"]["name"]) for item in manifests]
    assert len(names) == len(set(names))


def test_strict_validation_notices_a_misspelt_field() -> None:
    deployment = copy.deepcopy(one(rendered("demo"), "Deployment", "-triton"))
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        validate([deployment], "1.37")


def test_the_three_sets_show_every_feature() -> None:
    kinds = {item["kind"] for name in SETS for item in rendered(name)}
    assert kinds >= {
        *("PodDisruptionBudget", "HorizontalPodAutoscaler", "ScaledObject", "ServiceMonitor"),
        *("PrometheusRule", "Ingress"),
    }
    custom = {item["apiVersion"].split("/")[0] for name in SETS for item in rendered(name)}
    assert set(CUSTOM_GROUPS) <= custom


def test_the_readmes_table_is_that_of_the_values() -> None:
    page = (CHART / "README.md").read_text()
    assert page == chart_files.readme(), "run `make chart`"
    assert page.count("\n| `") > 80


def test_a_value_without_description_is_an_error() -> None:
    text = (CHART / "values.yaml").read_text()
    with pytest.raises(SystemExit, match=r"triton\.bogus has no"):
        chart_files.table(text.replace("triton:\n", "triton:\n  bogus: 1\n", 1))


def test_the_rules_are_those_of_deploy_prometheus() -> None:
    assert chart_files.rules()
    for path, text in chart_files.rules().items():
        assert path.read_text() == text, f"{path.name}: run `make chart`"


def test_the_schema_knows_exactly_the_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    del schema["properties"]["global"]  # Helm's own

    def compare(value: Any, node: dict[str, Any], path: str) -> None:
        if "properties" not in node:
            return
        assert set(node["properties"]) == set(value), path
        assert node["additionalProperties"] is False, f"{path}: a typo would be ignored"
        for name, inner in node["properties"].items():
            compare(value[name], inner, f"{path}.{name}")

    # Resources have names of their own, such as those of GPUs.
    schema["properties"]["triton"]["properties"].pop("resources")
    compare(
        {**values(), "triton": {k: v for k, v in values()["triton"].items() if k != "resources"}},
        schema,
        "values",
    )


def test_the_chart_is_of_the_products_version() -> None:
    project = tomllib.loads((CHART.parents[2] / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert str(chart["appVersion"]) == project["version"]
