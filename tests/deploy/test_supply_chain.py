"""What images and releases are made of: hashed requirements, workflows without surprises."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from tool_scripts import TOOLS, load_tool

ROOT = TOOLS.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
lock = load_tool("lock_requirements")
LEFT_OUT = {"huggingface-hub"}
"""Declared by `tokenizers` for downloads, which serving never does."""


def extras() -> dict[str, set[str]]:
    """Extras that pyproject.toml asks of packages, such as `grpc` of `tritonclient[grpc]`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, set[str]] = {}
    for name in ("demo", "gateway", "tracing"):
        for text in project["optional-dependencies"][name]:
            needed = Requirement(text)
            found.setdefault(lock.normalised(needed.name), set()).update(needed.extras)
    return found


# --- requirements -------------------------------------------------------------------------------


@pytest.fixture(params=lock.locked_files(), ids=lambda path: path.stem)
def locked(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_everything_in_an_image_is_pinned_and_hashed(locked: Path) -> None:
    found = lock.pins(locked.read_text())
    assert found
    bare = [name for name, (_, hashes) in found.items() if not hashes]
    assert not bare, f"{locked.name}: no hash of {', '.join(bare)}: run `make lock`"


def test_images_have_the_versions_that_are_tested(locked: Path) -> None:
    tested: dict[str, str] = {}
    for name in ("run", "test", "locust", "demo"):
        for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
            if pin := re.match(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)$", line):
                tested[lock.normalised(pin[1])] = pin[2]
    both = {
        name: version
        for name, (version, _) in lock.pins(locked.read_text()).items()
        if name in tested
    }
    assert both, "nothing in common: the comparison is broken"
    assert both == {name: tested[name] for name in both}


def test_nothing_that_an_image_imports_is_missing(locked: Path) -> None:
    """They are installed without dependencies: the file must have them all. Load test and server
    add theirs to the gateway's environment, and are judged with it."""
    found = lock.pins(locked.read_text())
    beside = found
    if locked.stem in ("image-loadtest", "image-server"):
        beside = {**found, **lock.pins((locked.parent / "image-gateway.txt").read_text())}
    looked_at = 0
    wanted_extras = extras()
    for name, (version, _) in found.items():
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # not part of the environment that runs this
        if package.version != version:
            continue
        looked_at += 1
        for text in package.requires or ():
            needed = Requirement(text)
            asked = {"", *wanted_extras.get(name, ())}
            if needed.marker is None or any(needed.marker.evaluate({"extra": x}) for x in asked):
                wanted = lock.normalised(needed.name)
                assert wanted in beside or wanted in LEFT_OUT, f"{name} needs {wanted}"
    assert looked_at >= 3


@pytest.mark.parametrize("line", ["numpy", "numpy>=1", "-r other.txt", "numpy==1\nNumPy==2"])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"must be|twice"):
        lock.pins(line)


# --- workflows ----------------------------------------------------------------------------------


def load(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in load(path)["jobs"].items():
            yield f"{path.stem}.{name}", job


def scripts() -> Iterator[str]:
    for _, job in jobs():
        for step in job["steps"]:
            if "run" in step:
                yield step["run"]


def test_every_action_is_pinned_by_commit_with_its_version() -> None:
    used = [
        line.strip().removeprefix("- ")
        for path in WORKFLOWS
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert used
    for line in used:
        assert re.fullmatch(r"uses: actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    versions = {re.split(r"[@ ]", line)[1]: line for line in used}
    assert len(set(used)) == len(versions), "one version of each action"


def test_workflows_may_read_and_nothing_else() -> None:
    for path in WORKFLOWS:
        workflow = load(path)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        triggers = workflow[True]  # YAML 1.1 reads the key `on` so
        assert "pull_request_target" not in triggers
    for name, job in jobs():
        assert "permissions" not in job, name
        assert job["timeout-minutes"] <= 90, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name
    for script in scripts():
        assert "${{" not in script, "expressions in scripts can be injected into: use env"
        assert "secrets." not in script


def test_ci_runs_what_ci_run_runs() -> None:
    test = dict(jobs())["ci.test"]
    assert test["container"] == "debian:12"
    assert ".ci/run" in [step.get("run") for step in test["steps"]]


def test_what_workflows_call_exists() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        word
        for script in scripts()
        for line in re.findall(r"^make (.*)$", script, re.MULTILINE)
        for word in line.split()
        if "=" not in word
    }
    assert called >= {"lint", "types", "sanitizers", "deploy-test", "test-slow", "sbom"}
    assert called <= targets
    for script in scripts():
        for path in re.findall(r"tests/[\w/.]+", script):
            assert (ROOT / path).exists(), path
    presets = json.loads((ROOT / "cpp_engine" / "CMakePresets.json").read_text())
    tested = {preset["name"] for preset in presets["testPresets"]}
    assert set(dict(jobs())["ci.sanitizers"]["strategy"]["matrix"]["preset"]) <= tested

    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    assert set(dict(jobs())["images.build"]["strategy"]["matrix"]["target"]) <= stages


def test_githubs_schema() -> None:
    package = pytest.importorskip("check_jsonschema", reason="`make deploy-test` installs it")
    files = importlib.resources.files(package) / "builtin_schemas" / "vendor"
    schema = json.loads((files / "github-workflows.json").read_text())
    for path in WORKFLOWS:
        workflow = {("on" if key is True else key): value for key, value in load(path).items()}
        jsonschema.validate(workflow, schema)
        broken = {**workflow, "permisions": {}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_an_auditor_finds_nothing() -> None:
    program = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("no zizmor: `make deploy-test` installs it")
    done = subprocess.run(
        [program, "--offline", "--no-progress", *map(str, WORKFLOWS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- bills of materials -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_bill_of_materials_names_every_package_with_its_hash(
    locked: Path, tmp_path: Path
) -> None:
    program = ROOT / ".cache" / "supply-chain" / "bin" / "cyclonedx-py"
    if not program.exists():
        pytest.skip("no cyclonedx-py: `make sbom` installs it")
    out = tmp_path / "sbom.json"
    command = [str(program), "requirements", "--output-reproducible", "--of", "JSON"]
    subprocess.run([*command, "-o", str(out), str(locked)], check=True, capture_output=True)
    bill = json.loads(out.read_text())
    assert bill["bomFormat"] == "CycloneDX"
    listed = {lock.normalised(item["name"]): item for item in bill["components"]}
    pinned = lock.pins(locked.read_text())
    assert {name: item["version"] for name, item in listed.items()} == {
        name: version for name, (version, _) in pinned.items()
    }
    for name, item in listed.items():
        hashes = {
            entry["content"] for source in item["externalReferences"] for entry in source["hashes"]
        }
        assert len(hashes) == pinned[name][1], name
