"""``python -m perf.bench_steps``: the C++ engine's steps without anything around them.

Decode steps of 1 to 16 rows and whole prompts, straight into ``pocket_cpp_core.Engine``.
``--library`` names a build of that module; every build named runs in a process of its own and takes
its turn in every round, so a change of the engine is judged by a ratio within one run:

    python -m perf.bench_steps --library before.so --library after.so

Exit status 3: the machine was busy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perf.machine import BusyMonitor, MachineBusyError, describe_machine
from perf.records import Record, figure, text_table, write_records
from perf.run_options import EXIT_BUSY, complain, model_path

BENCH = "bench_steps"
CONTEXT = 128
"""Positions behind a decoding row: the middle of workload A."""
STEPS = 32
"""Decode steps a round; the round's figure is their median."""
CHUNK = 512
MAX_ROWS = 16
_BLOCK = 16
_SEED = 5


@dataclass(frozen=True, slots=True)
class Case:
    """``kind``: "decode", with ``size`` rows a step, or "prompt", of ``size`` tokens."""

    kind: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.size}"


class Worker:
    """One build of the engine; runs in the child process."""

    def __init__(self, library: str, model: str, kv_dtype: str, threads: int, longest: int) -> None:
        spec = importlib.util.spec_from_file_location("pocket_cpp_core", library)
        assert spec is not None
        assert spec.loader is not None
        core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(core)
        blocks = -(-max(longest, CONTEXT + STEPS) // _BLOCK)
        self._engine: Any = core.Engine(
            model,
            num_blocks=MAX_ROWS * blocks,
            max_sequences=MAX_ROWS,
            max_batch_tokens=CHUNK,
            max_context=blocks * _BLOCK,
            kv_dtype=kv_dtype,
            threads=threads,
        )
        self._tables = np.arange(MAX_ROWS * blocks, dtype=np.int32).reshape(MAX_ROWS, blocks)
        self._vocab = int(self._engine.model_info["vocab"])
        self._tokens = np.random.default_rng(_SEED).integers(0, self._vocab, max(longest, 4096))
        for row in range(MAX_ROWS):
            self._step([row], 0, CONTEXT, wanted=False)

    def _step(self, rows: Sequence[int], start: int, count: int, *, wanted: bool) -> float:
        """``count`` tokens from position ``start`` on in each of the sequences; seconds."""
        sequences = len(rows)
        offsets = np.arange(sequences + 1, dtype=np.int32) * count
        wanted_rows = offsets[1:] - 1 if wanted else offsets[:0]
        tokens = np.tile(self._tokens[start : start + count], sequences)
        arrays = {
            "token_ids": ((tokens + np.repeat(rows, count)) % self._vocab).astype(np.int32),
            "positions": np.tile(np.arange(start, start + count, dtype=np.int32), sequences),
            "sequence_offsets": offsets,
            "block_tables": self._tables,
            "table_rows": np.array(rows, dtype=np.int32),
            "logits_rows": wanted_rows,
            "temperature": np.zeros(len(wanted_rows), np.float32),
            "top_k": np.zeros(len(wanted_rows), np.int32),
            "top_p": np.ones(len(wanted_rows), np.float32),
            "min_p": np.zeros(len(wanted_rows), np.float32),
            "seed": np.zeros(len(wanted_rows), np.uint64),
            "token_index": np.zeros(len(wanted_rows), np.uint64),
        }
        begin = time.perf_counter()
        self._engine.step(**arrays)
        return time.perf_counter() - begin

    def run(self, kind: str, size: int) -> float:
        if kind == "decode":
            rows = range(size)
            times = [self._step(rows, CONTEXT + i, 1, wanted=True) for i in range(STEPS)]
            return statistics.median(times)
        starts = range(0, size, CHUNK)
        return sum(
            self._step([0], start, min(CHUNK, size - start), wanted=start + CHUNK >= size)
            for start in starts
        )


def serve(arguments: list[str]) -> int:
    """The child process: a case a line in, seconds out."""
    library, model, kv_dtype, threads, longest = arguments
    worker = Worker(library, model, kv_dtype, int(threads), int(longest))
    print("ready", flush=True)
    for line in sys.stdin:
        kind, size = json.loads(line)
        print(worker.run(kind, size), flush=True)
    return 0


class Build:
    """The parent's end of a worker."""

    def __init__(self, name: str, library: Path, arguments: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "perf.bench_steps", "--worker", str(library), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: the worker ended with {self._process.wait()}")
        return line

    def measure(self, case: Case) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([case.kind, case.size]) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self._process.communicate()  # its input ends, and so does it


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--worker"]:
        return serve(arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--library", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--model", help="a GGUF file (default: SmolLM2-135M of the test extra)")
    parser.add_argument("--rows", default="1,2,4,8,16", help="of decode steps, at most 16")
    parser.add_argument("--prompts", default="64,1024", help="tokens")
    parser.add_argument("--kv-dtype", default="f16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--allow-busy", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    sizes = {
        kind: [int(size) for size in text.split(",") if size]
        for kind, text in (("decode", options.rows), ("prompt", options.prompts))
    }
    cases = [Case(kind, size) for kind, of_kind in sizes.items() for size in of_kind]
    try:
        records = measure(options, cases, max([*sizes["prompt"], CONTEXT]))
    except MachineBusyError as error:
        complain(str(error))
        return EXIT_BUSY
    print(table(records, cases))
    print(f"\n{describe_machine().summary()}. Command: {command(arguments)}")
    if options.json is not None:
        write_records(options.json, records)
    return 0


def command(arguments: Sequence[str]) -> str:
    return " ".join(["python -m perf.bench_steps", *arguments])


def measure(options: argparse.Namespace, cases: Sequence[Case], longest: int) -> list[Record]:
    """Every case of every build, in turns.

    Raises:
        MachineBusyError: others used the CPU, and ``--allow-busy`` is not given.
    """
    libraries = options.library or [Path(own_library())]
    settings = [str(model_path(options.model)), options.kv_dtype]
    settings += [str(options.threads), str(longest)]
    monitor = BusyMonitor()
    builds = [Build(f"build {index}", library, settings) for index, library in enumerate(libraries)]
    samples: dict[tuple[str, Case], list[float]] = {}
    try:
        for case in cases:  # the first call of a shape touches memory that later ones find
            for build in builds:
                build.measure(case)
        with monitor.measuring():
            for turn in range(options.rounds):
                for case in cases:
                    first = turn % len(builds)
                    for build in builds[first:] + builds[:first]:
                        samples.setdefault((build.name, case), []).append(build.measure(case))
    finally:
        for build in builds:
            build.close()
    if not (options.allow_busy or monitor.last_was_quiet()):
        raise MachineBusyError(monitor.complaint())
    return [
        Record.of(BENCH, name, case.name, case.size, "step_seconds", "s", values)
        for (name, case), values in samples.items()
    ]


def own_library() -> str:
    spec = importlib.util.find_spec("pocket_cpp_core")
    if spec is None or spec.origin is None:
        raise RuntimeError("pocket_cpp_core is not installed")
    return spec.origin


def table(records: Sequence[Record], cases: Sequence[Case]) -> str:
    """Milliseconds of each build and, from the second on, the ratio to the first."""
    names = list(dict.fromkeys(record.engine for record in records))
    found = {(record.engine, record.workload): record for record in records}
    header = ["step", *(f"{name}, ms" for name in names), *(f"0 / {n[6:]}" for n in names[1:])]
    rows = []
    for case in cases:
        times = [found[name, case.name] for name in names]
        ratios = [
            statistics.median(
                first / other for first, other in zip(times[0].samples, t.samples, strict=True)
            )
            for t in times[1:]
        ]
        rows.append(
            [case.name, *(figure(t.value * 1e3) for t in times), *(f"{r:.3f}x" for r in ratios)]
        )
    return text_table(header, rows)


if __name__ == "__main__":
    raise SystemExit(main())
