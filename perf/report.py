"""Writes measured tables into the documentation, between markers.

A section ``NAME`` of ``docs/benchmarks.md`` lies between ``<!-- begin NAME -->`` and
``<!-- end NAME -->``; everything outside is written by hand and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perf.records import markdown_table

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def replace_section(text: str, name: str, body: str) -> str:
    """``text`` with what is between the markers of ``name`` replaced by ``body``.

    Raises:
        ValueError: the markers are missing or in the wrong order.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    start, stop = text.find(begin), text.find(end)
    if start < 0 or stop < start:
        raise ValueError(f"no section between {begin} and {end}")
    return f"{text[: start + len(begin)]}\n\n{body.strip()}\n\n{text[stop:]}"


def update_section(
    document: Path,
    name: str,
    tables: Sequence[Table],
    footer: str,
    image: tuple[str, str] | None = None,
) -> None:
    """Rewrite a section: its tables, an image (path, alternative text) and the run's facts.

    Raises:
        ValueError: the document has no such section.
    """
    parts = [markdown_table(header, rows) for header, rows in tables if rows]
    if image is not None:
        parts.append(f"![{image[1]}]({image[0]})")
    parts.append(footer)
    text = document.read_text(encoding="utf-8")
    document.write_text(replace_section(text, name, "\n\n".join(parts)), encoding="utf-8")
