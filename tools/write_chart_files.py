"""Writes what the Helm chart has from elsewhere: `python tools/write_chart_files.py`.

The table in the chart's README comes from the comments in values.yaml, the rules are copies of
deploy/prometheus/rules (a chart can read only its own files). A test fails while they differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "pocketllm"
RULES = ROOT / "deploy" / "prometheus" / "rules"
_KEY = re.compile(r"^(?P<indent> *)(?P<name>[A-Za-z]\w*):")
_SECTION = re.compile(r"<!-- values: begin -->.*<!-- values: end -->", re.DOTALL)


def descriptions(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, description) of every value with a `# --` comment, in the file's order."""
    path: list[tuple[int, str]] = []
    words: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            words = [stripped.removeprefix("# -- ")]
        elif stripped.startswith("# ") and words:
            words.append(stripped.removeprefix("# "))
        elif found := _KEY.match(line):
            indent = len(found["indent"])
            path = [item for item in path if item[0] < indent] + [(indent, found["name"])]
            if words:
                yield tuple(name for _, name in path), " ".join(words)
            words = []
        elif not stripped:
            words = []


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of everything that is not a group of further values."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def table(text: str) -> str:
    """The values of ``text`` (values.yaml) as a table.

    Raises:
        SystemExit: a value without a description.
    """
    values = yaml.safe_load(text)
    described = dict(descriptions(text))
    for leaf in leaves(values):
        if not any(leaf[:length] in described for length in range(1, len(leaf) + 1)):
            raise SystemExit(f"values.yaml: {'.'.join(leaf)} has no `# --` comment")
    rows = ["| Value | Default | Meaning |", "|---|---|---|"]
    for path, words in described.items():
        default: Any = values
        for name in path:
            default = default[name]
        rows.append(f"| `{'.'.join(path)}` | `{json.dumps(default)}` | {words} |")
    return "\n".join(rows)


def readme() -> str:
    """The chart's README with a current table."""
    page = (CHART / "README.md").read_text()
    current = table((CHART / "values.yaml").read_text())
    text, count = _SECTION.subn(
        lambda _: f"<!-- values: begin -->\n{current}\n<!-- values: end -->", page
    )
    if count != 1:
        raise SystemExit(f"README.md: one section <!-- values --> is needed, found {count}")
    return text


def rules() -> dict[Path, str]:
    """The chart's rule files and what must be in them."""
    return {
        CHART / "files" / "rules" / path.name: path.read_text()
        for path in sorted(RULES.glob("*.yml"))
    }


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme())
    for target, content in rules().items():
        target.write_text(content)
