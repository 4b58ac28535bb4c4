"""The front door: links that lead somewhere, and commit hooks that do what `make lint` does."""

from __future__ import annotations

import re

import pytest
import yaml
from tool_scripts import TOOLS

ROOT = TOOLS.parent
PAGES = ("README.md", "SECURITY.md", "docs/deploy.md", "deploy/helm/pocketllm/README.md")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing
    named = set(re.findall(r"\b(?:docs|tools|tests)/[\w/]+\.(?:md|py)\b", text))
    assert not [name for name in named if not (ROOT / name).exists()]
    assert links or named


def test_hooks_are_the_checks_of_make_lint() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    [repository] = config["repos"]
    assert repository["repo"] == "local", "hooks of others would be fetched"
    entries = [hook["entry"] for hook in repository["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    for entry in entries:
        program, *_ = entry.split()
        tool = program.removeprefix(".venv/bin/")
        assert tool != program, "the environment's, not the machine's"
        assert f"$(BIN)/{tool}" in makefile, f"{tool} is not what `make lint types` runs"
    assert {entry.split("/")[2].split()[0] for entry in entries} == {
        "ruff",
        "clang-format",
        "mypy",
    }
