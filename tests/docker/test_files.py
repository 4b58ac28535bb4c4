"""What can be said about the container files without an engine: one table of settings, pinned and
hardened services, the same versions everywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_project import ROOT

_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
_ROW = re.compile(r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\|", re.MULTILINE)
COMPOSE = ROOT / "compose.yaml"
GPU = ROOT / "compose.gpu.yaml"


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def variables() -> dict[str, str]:
    """Every setting with its default; one that is used twice has one default."""
    found: dict[str, str] = {}
    for path in (COMPOSE, GPU):
        for name, default in _VARIABLE.findall(path.read_text()):
            assert found.setdefault(name, default) == default, name
    return found


def test_the_table_of_settings_is_complete() -> None:
    part = (ROOT / "docs" / "deploy.md").read_text().split("## Docker Compose\n")[1]
    rows = dict(_ROW.findall(re.split(r"^## ", part, flags=re.MULTILINE)[0]))
    assert rows == variables()


def test_the_example_has_every_setting_once() -> None:
    text = (ROOT / ".env.example").read_text()
    names = re.findall(r"^#?([A-Z_]+)=", text, re.MULTILINE)
    assert sorted(names) == sorted([*variables(), "COMPOSE_PROFILES"])
    for line in re.findall(r"^[^#\n].*$", text, re.MULTILINE):
        assert line == "COMPOSE_PROFILES=demo", "copied as it is, it only starts the demo"
    rest = text.split("# --- everything else", 1)[1]
    for name, value in re.findall(r"^#([A-Z_]+)=(\S*)", rest, re.MULTILINE):
        default = variables()[name]
        if default and name not in ("POCKETLLM_BUILD_NETWORK", "OTEL_TRACES_EXPORTER"):
            assert value == default, name


def test_every_service_is_hardened_and_limited(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["init"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service["user"].startswith("0"), name
        assert service["mem_limit"], name
        assert service["restart"] in ("unless-stopped", "no"), name
        assert "privileged" not in service
        assert "network_mode" not in service


def test_only_the_gateway_can_be_published_beyond_this_machine(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        for port in service.get("ports", ()):
            address = "${POCKETLLM_BIND:-127.0.0.1}:" if name == "gateway" else "127.0.0.1:"
            assert port.startswith(address), name
    assert "--published-host=${POCKETLLM_BIND:-127.0.0.1}" in services["gateway"]["command"]


def test_images_are_pinned_and_the_same_in_both_files() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.MULTILINE))
    assert defaults["BASE_IMAGE"] == variables()["TRITON_BASE"]
    assert defaults["PYTHON_IMAGE"] == variables()["PYTHON_BASE"]
    public = [defaults["BASE_IMAGE"], defaults["PYTHON_IMAGE"], variables()["PROMETHEUS_IMAGE"],
              variables()["GRAFANA_IMAGE"]]  # fmt: skip
    for image in public:
        assert re.search(r":v?\d+\.\d+", image), f"{image} has no version"


def test_files_that_services_mount_exist(services: dict[str, dict[str, Any]]) -> None:
    sources = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
    ]
    assert any(source.startswith("./deploy") for source in sources)
    for source in sources:
        assert not source.startswith("./") or (ROOT / source).exists(), source


def test_prometheus_has_the_jobs_of_the_rules() -> None:
    folder = ROOT / "deploy" / "prometheus"
    own, compose = (yaml.safe_load((folder / name).read_text())
                    for name in ("prometheus.yml", "compose.yml"))  # fmt: skip
    assert own["global"] == compose["global"]
    assert own["rule_files"] == compose["rule_files"]
    jobs = [[job["job_name"] for job in config["scrape_configs"]] for config in (own, compose)]
    assert jobs[0] == jobs[1]


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {key.split("[")[0].lower().replace("_", "-"): value.split()[0] for key, value in pairs}


def test_images_have_the_versions_that_are_tested() -> None:
    tested = {**_pins("run.txt"), **_pins("test.txt"), **_pins("locust.txt")}
    seen = 0
    for name in ("build", "server", "gateway", "loadtest"):
        for package, version in _pins(f"image-{name}.txt").items():
            seen += package in tested
            assert tested.get(package, version) == version, package
    assert seen >= 10


def test_copied_paths_are_in_the_context() -> None:
    """.dockerignore lets through what the Dockerfile copies, and nothing that is not needed."""
    allowed = {
        line.removeprefix("!").split("/")[0]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    copied = {
        word.split("/")[0]
        for line in re.findall(r"^COPY (?!--)(.+) \S+$", dockerfile, re.MULTILINE)
        for word in line.split()
    }
    assert copied - {"."} <= allowed
    assert not {".git", ".cache", ".venv", "tests"} & allowed


def test_hadolint() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint is not installed: pip install -r requirements/docker.txt")
    files = [ROOT / "docker" / "Dockerfile", ROOT / "docker" / "stand-ins" / "Dockerfile"]
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_haproxy_accepts_its_configuration() -> None:
    program = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if program is None:
        pytest.skip("haproxy is not installed (Debian: apt-get install haproxy)")
    command = [program, "-c", "-f", str(ROOT / "deploy" / "haproxy.cfg")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
