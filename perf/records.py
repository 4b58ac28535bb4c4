"""The one record type that every benchmark writes, its JSON file and its tables.

A file written with ``--json`` is a plain list of records, so that any two runs can be compared by a
script.  Facts about the run as a whole (machine, commit, whether it may be published) lie beside it
in ``FILE.run.json``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_FIELDS = ("bench", "engine", "workload", "concurrency", "metric", "value", "unit", "samples")


@dataclass(frozen=True, slots=True)
class Record:
    """One measured figure.

    ``engine`` is ``pocketllm`` or the peer's name; ``metric`` carries its unit as Prometheus names
    do (``decode_tokens_per_second``, ``wall_seconds``); ``value`` is the median of ``samples``
    unless the metric says otherwise (``_p99``); ``concurrency`` is the number of requests at once.
    """

    bench: str
    engine: str
    workload: str
    concurrency: int
    metric: str
    value: float
    unit: str
    samples: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        bench: str,
        engine: str,
        workload: str,
        concurrency: int,
        metric: str,
        unit: str,
        samples: Sequence[float],
    ) -> Record:
        """A record whose value is the median of ``samples``.

        Raises:
            ValueError: no samples.
        """
        if not samples:
            raise ValueError(f"{engine} {workload} {metric}: no samples")
        value = statistics.median(samples)
        return cls(bench, engine, workload, concurrency, metric, value, unit, tuple(samples))


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write ``records`` as a JSON list, one record a line so that diffs stay readable."""
    lines = [json.dumps(asdict(record)) for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """Read what ``write_records`` wrote.

    Raises:
        ValueError: not a list of records; the message names the entry and the field.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{path.name}: a list of records is needed, got {type(entries).__name__}")
    return [_record(path.name, index, entry) for index, entry in enumerate(entries)]


def _record(name: str, index: int, entry: object) -> Record:
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        raise ValueError(f"{name}[{index}]: a record has exactly the fields {', '.join(_FIELDS)}")
    return Record(**{**entry, "samples": tuple(entry["samples"])})


def find(
    records: Iterable[Record], *, engine: str, workload: str, metric: str | None = None
) -> Record | None:
    """The first record of that engine and workload (and metric), or None."""
    for record in records:
        if (record.engine, record.workload) == (engine, workload) and metric in (
            None,
            record.metric,
        ):
            return record
    return None


def figure(value: float | None) -> str:
    """A number with three significant digits or thousands separators; ``-`` for None."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned for a terminal: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, rows)])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table: the first column to the left, the others to the right."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def records_table(records: Sequence[Record]) -> str:
    """Every record on one line, for people."""
    rows = [
        (
            f"{record.workload}",
            record.engine,
            str(record.concurrency),
            record.metric,
            figure(record.value),
            record.unit,
            _spread(record.samples),
        )
        for record in records
    ]
    header = ("workload", "engine", "concurrency", "metric", "value", "unit", "min .. max")
    return text_table(header, rows)


def _spread(samples: Sequence[float]) -> str:
    return f"{figure(min(samples))} .. {figure(max(samples))}" if len(samples) > 1 else ""
