"""What the rendered manifests say agrees with our programs: ports, options, metrics, times."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import yaml
from chart import (
    CHART,
    SETS,
    Manifest,
    containers,
    one,
    option,
    pods,
    rendered,
    selects,
)

from pocket_backend.api import EngineArgs
from pocket_backend.cli import main as cli
from pocket_backend.cli import serving
from pocket_backend.cli.probe import check
from pocket_backend.observability.names import METRICS
from pocket_backend.triton import launcher, shm, supervisor
from pocket_backend.triton.settings import find_default_model
from pocket_client.gateway.__main__ import _parser as gateway_parser
from pocket_client.gateway.app import create_app
from pocket_client.gateway.auth import ApiKeys, entry_of
from pocket_client.gateway.discovery import parse_upstreams
from pocket_client.gateway.settings import GatewaySettings

ADAPTER = CHART.parent / "prometheus-adapter.yaml"


@pytest.fixture(params=SETS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)


def pod(manifests: list[Manifest], component: str) -> Manifest:
    return dict(pods(manifests))[component]


def main_container(manifests: list[Manifest], component: str) -> Manifest:
    [container] = pod(manifests, component)["containers"]
    return container


@cache
def gateway_routes() -> set[str]:
    return {route.path for route in create_app(GatewaySettings()).routes}  # type: ignore[attr-defined]


def mebibytes(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


# --- security -----------------------------------------------------------------------------------


def test_every_container_is_confined(manifests: list[Manifest]) -> None:
    for component, spec in pods(manifests):
        assert spec["automountServiceAccountToken"] is False
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] >= 1000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), component
        for container in containers(spec):
            assert container["securityContext"] == {
                "runAsNonRoot": True,
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, container["name"]
            assert "privileged" not in container["securityContext"]
            resources = container["resources"]
            assert resources["limits"]["memory"], "a container without limit takes the node's"
            assert resources["requests"]["cpu"]
        assert not any("hostPath" in volume for volume in spec["volumes"])
    account = one(manifests, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert not [item for item in manifests if "Role" in item["kind"]], "nothing talks to the API"


def test_no_key_is_in_a_manifest_or_an_environment(manifests: list[Manifest]) -> None:
    assert not [item for item in manifests if item["kind"] == "Secret"]
    for _, spec in pods(manifests):
        for container in containers(spec):
            for variable in container.get("env", []):
                if "SECRET" in variable["name"] or "KEY" in variable["name"]:
                    assert "secretKeyRef" in variable["valueFrom"]


def test_each_pod_is_reached_only_at_listed_ports(manifests: list[Manifest]) -> None:
    policies = [item for item in manifests if item["kind"] == "NetworkPolicy"]
    for component, spec in pods(manifests):
        labels = labels_of(manifests, component)
        [policy] = [
            item for item in policies if selects(item["spec"]["podSelector"]["matchLabels"], labels)
        ]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        known = {port["name"] for c in spec["containers"] for port in c["ports"]}
        for rule in policy["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= known
            assert rule["from"], "every rule says from whom"
    triton = one(manifests, "NetworkPolicy", "-triton")["spec"]
    [first, *_] = triton["ingress"]
    assert selects(first["from"][0]["podSelector"]["matchLabels"], labels_of(manifests, "gateway"))
    assert first["ports"] == [{"protocol": "TCP", "port": "grpc"}]
    assert triton["egress"] == [], "a server asks nobody"
    egress = one(manifests, "NetworkPolicy", "-gateway")["spec"]["egress"]
    assert selects(egress[0]["to"][0]["podSelector"]["matchLabels"], labels_of(manifests, "triton"))
    assert {port["port"] for rule in egress for port in rule["ports"]} == {"grpc", 53}


def labels_of(manifests: list[Manifest], component: str) -> dict[str, str]:
    return one(manifests, "Deployment", f"-{component}")["spec"]["template"]["metadata"]["labels"]


# --- command lines and ports ----------------------------------------------------------------------


def test_our_programs_take_the_command_lines(manifests: list[Manifest]) -> None:
    triton = main_container(manifests, "triton")
    assert triton["command"] == ["pocketllm", "serve"]
    options = cli._parser().parse_args([*triton["command"][1:], *triton["args"]])
    assert options.host == "0.0.0.0"
    names = {port["name"]: port["containerPort"] for port in triton["ports"]}
    assert names == {
        "http": options.http_port,
        "grpc": options.grpc_port,
        "metrics": options.metrics_port,
    }
    EngineArgs(
        model="x",
        backend=options.backend,
        max_model_len=options.max_model_len,
        max_batch_size=options.max_batch_size,
        max_num_batched_tokens=options.max_num_batched_tokens,
        kv_cache_tokens=options.kv_cache_tokens,
        kv_cache_dtype=options.kv_cache_dtype,
        max_queue=options.max_queue,
    )
    serving.supervision_policy(options)

    gateway = main_container(manifests, "gateway")
    assert gateway["command"] == ["python3", "-m", "pocket_client.gateway"]
    settings = gateway_parser().parse_args(gateway["args"])
    assert gateway["ports"] == [{"name": "http", "containerPort": settings.port}]
    GatewaySettings(
        upstream=settings.upstream,
        model_name=settings.model_name,
        request_timeout=settings.request_timeout,
        max_in_flight=settings.max_in_flight,
        max_waiting=settings.max_waiting,
        max_in_flight_per_tenant=settings.max_in_flight_per_tenant,
    )


def test_the_gateway_finds_every_server(manifests: list[Manifest]) -> None:
    """By the headless service, whose name resolves to each ready pod."""
    service = one(manifests, "Service", "-triton-headless")
    upstream = option(main_container(manifests, "gateway"), "upstream")
    assert upstream is not None
    [(host, port)] = parse_upstreams(upstream).resolved
    assert host == f"{service['metadata']['name']}.llm.svc.cluster.local"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is False
    assert [item["port"] for item in service["spec"]["ports"]] == [port]


def test_services_lead_to_ports_that_exist(manifests: list[Manifest]) -> None:
    for service in (item for item in manifests if item["kind"] == "Service"):
        reached = [
            component
            for component, _ in pods(manifests)
            if selects(service["spec"]["selector"], labels_of(manifests, component))
        ]
        assert len(reached) == 1, service["metadata"]["name"]
        known = {port["name"] for port in main_container(manifests, reached[0])["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= known
    for ingress in (item for item in manifests if item["kind"] == "Ingress"):
        gateway = one(manifests, "Service", "-gateway")
        routes = gateway_routes()
        for path in ingress["spec"]["rules"][0]["http"]["paths"]:
            backend = path["backend"]["service"]
            assert backend["name"] == gateway["metadata"]["name"]
            assert backend["port"]["name"] in {port["name"] for port in gateway["spec"]["ports"]}
            assert any(route.startswith(path["path"]) for route in routes), path["path"]
            assert not path["path"].startswith("/metrics")


def test_m5_probes_ask_what_tells_busy_from_hung(manifests: list[Manifest]) -> None:
    triton = main_container(manifests, "triton")
    program, *arguments = triton["startupProbe"]["exec"]["command"]
    assert program == "pocketllm"
    options = cli._parser().parse_args(arguments)
    assert options.deep
    assert options.timeout < triton["startupProbe"]["timeoutSeconds"]
    assert check("http://127.0.0.1:9", deep=True, timeout=5.0) is not None

    start = float(option(triton, "start-timeout") or 0)
    for probe, least in (("startupProbe", start), ("livenessProbe", start)):
        patience = triton[probe]["periodSeconds"] * triton[probe]["failureThreshold"]
        assert patience > least, f"{probe} would kill a server that starts or restarts"
    ready = triton["readinessProbe"]
    assert ready["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
    assert ready["failureThreshold"] > 1, "one miss of a busy server is no reason"
    assert triton["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"

    gateway = main_container(manifests, "gateway")
    routes = gateway_routes()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert gateway[probe]["httpGet"]["path"] in routes
    assert gateway["readinessProbe"]["timeoutSeconds"] > GatewaySettings().ready_timeout


def test_nobody_is_killed_while_draining(manifests: list[Manifest]) -> None:
    deploys = dict(pods(manifests))
    triton = main_container(manifests, "triton")
    drain = float(option(triton, "drain-seconds") or 0)
    after = supervisor._DELIVERY_SECONDS + 2 * supervisor._ASK_SECONDS + serving._STOP_SECONDS + 5.0
    assert pre_stop(triton) + drain + after <= deploys["triton"]["terminationGracePeriodSeconds"]
    assert pre_stop(triton) > 10.0, "gateways ask DNS every 10 s"

    gateway = main_container(manifests, "gateway")
    drain = float(option(gateway, "drain-seconds") or 0)
    assert pre_stop(gateway) + drain < deploys["gateway"]["terminationGracePeriodSeconds"]


def pre_stop(container: Manifest) -> float:
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    return float(seconds)


def test_c1_shared_memory_is_memory_and_large_enough(manifests: list[Manifest]) -> None:
    spec = pod(manifests, "triton")
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    shared = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shared["medium"] == "Memory"
    assert mebibytes(shared["sizeLimit"]) * 2**20 >= 4 * shm.MIN_FREE_BYTES
    limit = spec["containers"][0]["resources"]["limits"]["memory"]
    assert mebibytes(shared["sizeLimit"]) < mebibytes(limit), "it counts against the limit"


def test_c3_everything_written_is_below_a_volume(manifests: list[Manifest]) -> None:
    for _, spec in pods(manifests):
        for container in spec["containers"]:
            environment = {item["name"]: item.get("value") for item in container["env"]}
            assert environment["HOME"] == "/tmp"
            writable = {
                mount["mountPath"]
                for mount in container["volumeMounts"]
                if not mount.get("readOnly")
            }
            assert "/tmp" in writable
            assert writable <= {"/tmp", "/dev/shm"}
    triton = main_container(manifests, "triton")
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in triton["env"]
    [model, *_] = triton["args"]
    mounts = {item["mountPath"] for item in triton["volumeMounts"] if item.get("readOnly")}
    assert any(model.startswith(f"{mount}/") for mount in mounts)


def test_the_demo_serves_the_packaged_model() -> None:
    spec = pod(rendered("demo"), "triton")
    [fetch] = spec["initContainers"]
    assert "command" not in fetch, "the image's own copies the model to /models"
    packaged = find_default_model()
    assert packaged is not None
    assert spec["containers"][0]["args"][0] == f"/models/{packaged.name}"


def test_the_cpu_limit_is_the_number_of_threads(manifests: list[Manifest]) -> None:
    """A limit does not change the affinity mask that the engine counts."""
    triton = main_container(manifests, "triton")
    [variable] = [item for item in triton["env"] if item["name"] == "POCKETLLM_THREADS"]
    assert variable["valueFrom"]["resourceFieldRef"] == {
        "containerName": "triton", "resource": "limits.cpu", "divisor": "1",
    }  # fmt: skip
    assert launcher.ServerOptions(model="x").environment == {}, "nothing overrides it"


# --- monitoring and scaling -----------------------------------------------------------------------


def series() -> set[str]:
    return {metric.name for metric in METRICS if metric.kind != "histogram"}


def test_scaling_asks_for_metrics_that_exist() -> None:
    names = re.compile(r"pocket_\w+")
    adapter = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    made = {rule["name"]["as"] for rule in adapter}
    for rule in adapter:
        assert set(names.findall(rule["seriesQuery"])) <= series()
        assert 'namespace!=""' in rule["seriesQuery"]

    spec = one(rendered("production"), "HorizontalPodAutoscaler")["spec"]
    asked = [metric["pods"]["metric"]["name"] for metric in spec["metrics"]]
    assert set(asked) == made
    deployment = one(rendered("production"), "Deployment", "-triton")
    check_target(spec["scaleTargetRef"], deployment)
    assert "replicas" not in deployment["spec"], "an update would undo the scaling"

    spec = one(rendered("gpu"), "ScaledObject")["spec"]
    queries = [trigger["metadata"]["query"] for trigger in spec["triggers"]]
    service = one(rendered("gpu"), "Service", "-triton")["metadata"]["name"]
    for query in queries:
        assert set(names.findall(query)) <= series()
        assert query.count(f'namespace="llm",service="{service}"') == query.count("{")
    assert any("waiting" in query for query in queries)
    assert any("kv_blocks" in query for query in queries)
    check_target(spec["scaleTargetRef"], one(rendered("gpu"), "Deployment", "-triton"))


def check_target(reference: dict[str, str], deployment: Manifest) -> None:
    assert reference == {
        "apiVersion": deployment["apiVersion"],
        "kind": deployment["kind"],
        "name": deployment["metadata"]["name"],
    }


@pytest.mark.parametrize("name", ["production", "gpu"])
def test_what_is_scraped_has_the_names_of_the_rules(name: str) -> None:
    manifests = rendered(name)
    jobs: dict[str, str] = {}
    for monitor in (item for item in manifests if item["kind"] == "ServiceMonitor"):
        found = [
            item
            for item in manifests
            if item["kind"] == "Service"
            and selects(monitor["spec"]["selector"]["matchLabels"], item["metadata"]["labels"])
        ]
        assert len(found) == 1, "each pod is scraped once"
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in found[0]["spec"]["ports"]}
        [job] = [r["replacement"] for r in endpoint["relabelings"] if r["targetLabel"] == "job"]
        jobs[job] = endpoint["port"]
    scraped = yaml.safe_load((CHART.parents[1] / "prometheus" / "prometheus.yml").read_text())
    assert set(jobs) == {config["job_name"] for config in scraped["scrape_configs"]}
    text = str([item for item in manifests if item["kind"] == "PrometheusRule"])
    assert set(re.findall(r'job="([\w-]+)"', text)) == set(jobs)
    monitored = one(manifests, "ServiceMonitor", "-gateway")["spec"]["endpoints"][0]
    assert monitored["authorization"]["credentials"]["key"] == "token", "it asks for a key"


def test_disruptions_take_one_at_a_time() -> None:
    manifests = rendered("production")
    for component, _ in pods(manifests):
        budget = one(manifests, "PodDisruptionBudget", f"-{component}")["spec"]
        assert budget["maxUnavailable"] == 1
        assert selects(budget["selector"]["matchLabels"], labels_of(manifests, component))
        spread = pod(manifests, component)["topologySpreadConstraints"]
        assert {item["topologyKey"] for item in spread} == {
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
        }
        for item in spread:
            assert selects(item["labelSelector"]["matchLabels"], labels_of(manifests, component))


def test_a_hashed_entry_is_what_the_schema_wants() -> None:
    schema: Any = json.loads((CHART / "values.schema.json").read_text())
    pattern = schema["properties"]["auth"]["properties"]["entries"]["items"]["pattern"]
    entry = entry_of("alice", "pk-secret")
    assert re.search(pattern, entry)
    assert not re.search(pattern, "pk-secret")
    assert ApiKeys.parse([entry], None)
