"""The chart under deploy/helm, and the manifests that were rendered from its three value sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from tool_scripts import load_tool

Manifest = dict[str, Any]

render_chart = load_tool("render_chart")
CHART: Path = render_chart.CHART
RENDERED: Path = render_chart.RENDERED
SETS: tuple[str, ...] = render_chart.SETS
KUBERNETES = {"demo": ("1.27", "1.37"), "production": ("1.27", "1.37"), "gpu": ("1.35", "1.37")}
"""The oldest and the newest version that each value set is for."""
CUSTOM_GROUPS = ("monitoring.coreos.com", "keda.sh")
"""API groups of operators, for which Kubernetes has no schema."""
_DURATION = re.compile(r"^\d+(ms|s|m|h)$")


def parse(text: str) -> list[Manifest]:
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


@cache
def rendered(name: str) -> list[Manifest]:
    """The committed manifests of a value set; shared, so not to be changed."""
    return parse((RENDERED / f"{name}.yaml").read_text())


def one(manifests: list[Manifest], kind: str, suffix: str = "") -> Manifest:
    """The only one of ``kind`` whose name ends so."""
    found = [
        item
        for item in manifests
        if item["kind"] == kind and item["metadata"]["name"].endswith(suffix)
    ]
    assert len(found) == 1, f"{kind} *{suffix}: {len(found)}"
    return found[0]


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(component, pod spec) of every Deployment."""
    for item in manifests:
        if item["kind"] == "Deployment":
            template = item["spec"]["template"]
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            yield component, template["spec"]


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def option(container: Manifest, name: str) -> str | None:
    """The value of ``--name=value`` on a container's command line; None: not there."""
    for argument in container["args"]:
        if argument.startswith(f"--{name}="):
            return str(argument.split("=", 1)[1])
    return None


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def validate(manifests: list[Manifest], *versions: str) -> None:
    """Against the API schemas, where an unknown field is an error; operators' kinds by shape."""
    for item in manifests:
        if item["apiVersion"].split("/")[0] in CUSTOM_GROUPS:
            check_custom(item)
            continue
        for version in versions:
            kubernetes_validate.validate(item, version, strict=True)


def check_custom(item: Manifest) -> None:
    """The fields that we use of the operators' kinds, as their documentation has them."""
    kind, spec = item["kind"], item["spec"]
    expected = {
        "ServiceMonitor": "monitoring.coreos.com/v1",
        "PrometheusRule": "monitoring.coreos.com/v1",
        "ScaledObject": "keda.sh/v1alpha1",
    }
    assert item["apiVersion"] == expected[kind]
    assert set(item) == {"apiVersion", "kind", "metadata", "spec"}
    {
        "ServiceMonitor": _check_service_monitor,
        "PrometheusRule": _check_rules,
        "ScaledObject": _check_scaled_object,
    }[kind](spec)


def _check_service_monitor(spec: Manifest) -> None:
    assert set(spec) == {"selector", "endpoints"}
    assert set(spec["selector"]) == {"matchLabels"}
    for endpoint in spec["endpoints"]:
        assert set(endpoint) <= {"port", "path", "interval", "authorization", "relabelings"}
        assert isinstance(endpoint["port"], str), "a port's name"
        assert _DURATION.match(endpoint["interval"])
        for rule in endpoint["relabelings"]:
            assert set(rule) <= {"action", "sourceLabels", "targetLabel", "replacement"}
        if "authorization" in endpoint:
            assert set(endpoint["authorization"]) == {"type", "credentials"}
            assert set(endpoint["authorization"]["credentials"]) == {"name", "key"}


def _check_rules(spec: Manifest) -> None:
    assert set(spec) == {"groups"}
    names = [group["name"] for group in spec["groups"]]
    assert len(names) == len(set(names)), f"group names of one PrometheusRule are unique: {names}"
    for group in spec["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert ("alert" in rule) != ("record" in rule)
            assert set(rule) <= {"alert", "record", "expr", "for", "labels", "annotations"}
            assert isinstance(rule["expr"], str)


def _check_scaled_object(spec: Manifest) -> None:
    assert set(spec) == {
        *("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "fallback"),
        *("advanced", "triggers"),
    }
    assert set(spec["scaleTargetRef"]) == {"apiVersion", "kind", "name"}
    for trigger in spec["triggers"]:
        assert trigger["type"] == "prometheus"
        assert trigger["metricType"] in ("AverageValue", "Value")
        metadata = trigger["metadata"]
        assert set(metadata) == {"serverAddress", "query", "threshold"}
        assert all(isinstance(value, str) for value in metadata.values()), "KEDA takes strings"
        assert float(metadata["threshold"]) > 0
