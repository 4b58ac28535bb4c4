"""Renders the chart's value sets into tests/deploy/rendered: `python tools/render_chart.py`.

The suite checks these files, which needs no Helm, and that they belong to the chart as it is:
INPUTS holds the hash of everything that they were made from. `make deploy-test` renders again.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "pocketllm"
RENDERED = ROOT / "tests" / "deploy" / "rendered"
SETS = ("demo", "production", "gpu")


def inputs_hash() -> str:
    """Of the names and contents of all files that decide what is rendered."""
    digest = hashlib.sha256()
    for path in sorted(CHART.rglob("*")):
        if path.is_file() and path.name not in ("README.md", "NOTES.txt"):
            digest.update(f"{path.relative_to(CHART)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def render(helm: Path, *arguments: str) -> str:
    """What ``helm template`` prints for release `pocketllm` in namespace `llm`.

    Raises:
        subprocess.CalledProcessError: Helm refuses; its ``stderr`` says why.
    """
    command = [str(helm), "template", "pocketllm", str(CHART), "--namespace", "llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def value_set(name: str) -> tuple[str, str]:
    """Arguments that choose ``values-<name>.yaml``."""
    return "--values", str(CHART / f"values-{name}.yaml")


def main(helm: Path) -> None:
    RENDERED.mkdir(exist_ok=True)
    for name in SETS:
        (RENDERED / f"{name}.yaml").write_text(render(helm, *value_set(name)))
    (RENDERED / "INPUTS").write_text(inputs_hash() + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from get_helm import HelmUnavailableError, get_helm

    try:
        main(get_helm())
    except HelmUnavailableError as problem:
        sys.exit(f"no Helm: {problem}")
    except subprocess.CalledProcessError as refused:
        sys.exit(refused.stderr)
