"""The tables of public bug reports in docs/ name tests that exist, and leave out no report."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PAGES = ("triton.md", "scheduling.md")
"""Pages with such a table; each row is ``| ids and name | ... | tests |``."""
REPORTS = {
    "D": (1, 2, 4, 5, 6, 7, 9, 10, 11),
    "T": (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 14, 15, 16),
    "V": (1, 2, 4, 5, 6, 7, 9, 11, 12),
    "S": (1, 3, 4, 5, 6, 7, 10, 11, 12, 13, 15, 16, 17, 19, 21),
}
"""The reports on text, the wire, validation and scheduling that this project sets out to settle."""
ROW = re.compile(r"^\| ((?:[DTVS]\d+(?:, )?)+)[ |]")
REFERENCE = re.compile(r"`((?:[\w/]+\.py)?(?:::[\w*]+)?)`")


def rows() -> Iterator[tuple[list[str], str]]:
    """(ids, the rest of the row) of every table."""
    for page in PAGES:
        for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
            found = ROW.match(line)
            if found:
                yield found[1].split(", "), line


ROWS = list(rows())


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    }


def test_every_report_has_one_row() -> None:
    listed = [name for ids, _ in ROWS for name in ids]
    expected = {f"{kind}{number}" for kind, numbers in REPORTS.items() for number in numbers}
    assert set(listed) == expected
    assert len(listed) == len(expected)


@pytest.mark.parametrize(("ids", "row"), ROWS, ids=["-".join(ids) for ids, _ in ROWS])
def test_the_tests_of_a_row_exist_and_carry_its_ids(ids: list[str], row: str) -> None:
    file = None
    names: set[str] = set()
    texts: list[str] = []
    for reference in REFERENCE.findall(row.rpartition(" | ")[2]):
        if not reference or (not reference.startswith("::") and ".py" not in reference):
            continue
        path, _, pattern = reference.partition("::")
        if path:
            matching = [f for f in TESTS.rglob(Path(path).name) if str(f).endswith(f"/{path}")]
            assert len(matching) == 1, f"{path}: {matching}"
            file = matching[0]
        assert file is not None, row
        texts.append(file.read_text(encoding="utf-8"))
        if pattern:
            found = {name for name in names_in(file) if fnmatch(name, pattern)}
            assert found, f"{file.name} has no {pattern}"
            names |= found
    assert texts, row
    for name in ids:
        assert any(n.startswith(f"test_{name.lower()}_") for n in names) or any(
            re.search(rf"\b{name}\b", text) for text in texts
        ), f"no test of this row names {name}"
