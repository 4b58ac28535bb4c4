"""``python -m perf.bench_interference``: running streams while a 4,096-token prompt prefills.

A long prompt is computed in chunks, and the running streams get one token per chunk. Their time
between two tokens should therefore be what a chunk takes, not what the prompt takes. Bar: the p99
over the streams during the prefill is at most twice that of the chunk's own time.

*The chunk's own time* is measured in the same round: the same engine, a prompt of the same length
alone on the machine, seconds of each call of the executor. *During the prefill* are all gaps
between two tokens of a stream that end after the prompt was submitted and begin before its first
token came.

Exit status 3: the machine was busy; 4: above the bar, with ``--fail-below-bar``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perf.machine import BUSY_LIMIT, MachineBusyError
from perf.records import Record, figure, text_table
from perf.run_options import (
    EXIT_BELOW_BAR,
    EXIT_BUSY,
    complain,
    load_corpus,
    make_bench,
    model_path,
    run_info,
    write_json,
)
from perf.workloads import Corpus
from pocket_backend.api import EngineArgs, GenerationRequest, SamplingParams
from pocket_backend.engine.unified import UnifiedEngine
from pocket_backend.executors.base import BackendExecutor
from pocket_backend.executors.registry import create_executor

if TYPE_CHECKING:
    from pocket_backend.api import TokenEvent
    from pocket_backend.core.step import ExecuteOutput, ExecuteRequest, MemoryInfo

BENCH = "bench_interference"
BAR = 2.0
STREAM_PROMPT = 64
LEAD_TOKENS = 8
"""Every stream has got this many tokens before the long prompt is sent."""
_TIMEOUT_SECONDS = 300.0


class TimedExecutor(BackendExecutor):
    """Passes everything on and notes what each step took. ``steps``: (prefill tokens, seconds)."""

    def __init__(self, inner: BackendExecutor) -> None:
        self._inner = inner
        self.steps: list[tuple[int, float]] = []

    def execute_model(self, requests: Sequence[ExecuteRequest]) -> Sequence[ExecuteOutput]:
        begin = time.perf_counter()
        outputs = self._inner.execute_model(requests)
        seconds = time.perf_counter() - begin
        self.steps.append((sum(len(r.token_ids) for r in requests if r.is_prefill), seconds))
        return outputs

    def get_memory_info(self) -> MemoryInfo:
        return self._inner.get_memory_info()

    def supports_feature(self, feature: str) -> bool:
        return self._inner.supports_feature(feature)

    def reset_slot(self, slot_id: int) -> None:
        self._inner.reset_slot(slot_id)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._inner.eos_token_ids

    def close(self) -> None:
        self._inner.close()


class _Stream:
    """When the tokens of one request came. Written by the engine thread."""

    def __init__(self, wake: int) -> None:
        self.times: list[float] = []
        self.error: Exception | None = None
        self.reached = threading.Event()
        """``wake`` tokens have come, or the request has ended."""
        self._wake = wake

    def take(self, event: TokenEvent) -> None:
        now = time.perf_counter()
        self.times.extend([now] * len(event.token_ids))
        if event.error is not None:
            self.error = event.error
        if len(self.times) >= self._wake or event.finish_reason is not None:
            self.reached.set()

    def wait(self) -> None:
        if not self.reached.wait(_TIMEOUT_SECONDS):
            raise RuntimeError("a request did not get its tokens in time")
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds."""

    chunks: tuple[float, ...]
    """Steps of the long prompt alone."""
    gaps: tuple[float, ...]
    """Between two tokens of a stream, during the prefill."""
    quiet_gaps: tuple[float, ...]
    """The same before the long prompt came."""
    first_token_alone: float
    first_token_beside: float

    @property
    def ratio(self) -> float:
        return p99(self.gaps) / p99(self.chunks)


def p99(values: Sequence[float]) -> float:
    """The smallest value that 99 % do not exceed (of few values: the largest)."""
    ordered = sorted(values)
    return ordered[max(0, -(-99 * len(ordered) // 100) - 1)]


class Interference:
    """One engine; ``run`` measures a round. Not thread-safe."""

    def __init__(self, args: EngineArgs) -> None:
        self._executor = TimedExecutor(create_executor(args))
        memory = self._executor.get_memory_info()
        self._engine = UnifiedEngine(
            self._executor,
            args.max_batch_size,
            memory.num_blocks * memory.block_size,
            max_num_batched_tokens=args.max_num_batched_tokens,
        )
        self._count = 0

    def close(self) -> None:
        self._engine.close()

    def run(self, prompt: Callable[[int], tuple[int, ...]], length: int, streams: int) -> Round:
        """``prompt(n)`` makes a prompt of ``n`` tokens that was not seen before."""
        chunks, alone = self._prefill(prompt(length))
        # So long that no stream ends before the prompt's first token; they are cancelled then.
        enough = LEAD_TOKENS + 2 * len(chunks) + 64
        running = [self._submit(prompt(STREAM_PROMPT), enough, LEAD_TOKENS) for _ in range(streams)]
        for _, stream in running:
            stream.wait()
        begin = time.perf_counter()
        _, beside = self._prefill(prompt(length))
        end = begin + beside
        for name, _ in running:
            self._engine.cancel(name)
        during: list[float] = []
        before: list[float] = []
        for _, stream in running:
            times = tuple(stream.times)
            for first, second in itertools.pairwise(times):
                if second <= begin:
                    before.append(second - first)
                elif first < end:
                    during.append(second - first)
        if not during or not before:
            raise RuntimeError("the streams got no tokens while the prompt was computed")
        return Round(tuple(chunks), tuple(during), tuple(before), alone, beside)

    def _prefill(self, prompt: tuple[int, ...]) -> tuple[list[float], float]:
        self._executor.steps.clear()
        begin = time.perf_counter()
        _, stream = self._submit(prompt, 1, 1)
        stream.wait()
        seconds = stream.times[0] - begin
        return [took for prefill, took in list(self._executor.steps) if prefill], seconds

    def _submit(self, prompt: tuple[int, ...], tokens: int, wake: int) -> tuple[str, _Stream]:
        self._count += 1
        name = f"{BENCH}-{self._count}"
        stream = _Stream(wake)
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._engine.submit(GenerationRequest(name, prompt, sampling), stream.take)
        return name, stream


def prompts(corpus: Corpus, seed: int) -> Callable[[int], tuple[int, ...]]:
    source = random.Random(seed)
    return lambda length: corpus.window(source, length)


def to_records(rounds: Sequence[Round], length: int, streams: int) -> list[Record]:
    workload = f"prefill {length} beside {streams} streams"

    def record(metric: str, unit: str, samples: Sequence[float]) -> Record:
        return Record.of(BENCH, "pocketllm", workload, streams, metric, unit, samples)

    return [
        record("inter_token_seconds_p99", "s", [p99(r.gaps) for r in rounds]),
        record("chunk_seconds_p99", "s", [p99(r.chunks) for r in rounds]),
        record("interference_ratio", "ratio", [r.ratio for r in rounds]),
        record("quiet_inter_token_seconds_p99", "s", [p99(r.quiet_gaps) for r in rounds]),
        record("ttft_seconds_alone", "s", [r.first_token_alone for r in rounds]),
        record("ttft_seconds_beside", "s", [r.first_token_beside for r in rounds]),
    ]


def main(arguments: list[str] | None = None) -> int:
    argv = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(argv)
    model = model_path(options.model)
    try:
        bench = make_bench(options, model)
    except MachineBusyError as error:
        complain(str(error))
        return EXIT_BUSY
    fake = str(model) == "fake"
    args = EngineArgs(
        model=str(model),
        backend="fake" if fake else "auto",
        # Steps that take no time would let the streams end before the prompt comes.
        backend_options={"delay_seconds": 0.002} if fake else {},
        threads=options.threads,
        max_num_batched_tokens=options.budget,
        max_model_len=options.length + 512,
        kv_cache_tokens=2 * (options.length + 512) + options.streams * 1024,
    )
    prompt = prompts(load_corpus(model), options.seed)
    subject = Interference(args)
    rounds: list[Round] = []
    try:
        for index in range(options.rounds + 1):
            with bench.monitor.measuring():
                result = subject.run(prompt, options.length, options.streams)
            if index:  # the first is the warm-up
                rounds.append(result)
                if not bench.monitor.last_was_quiet():
                    bench.disturbed.append(f"round {index}")
    finally:
        subject.close()
    try:
        if not options.allow_busy:
            bench.require_undisturbed()
    except MachineBusyError as error:
        complain(str(error))
        return EXIT_BUSY
    records = to_records(rounds, options.length, options.streams)
    info = run_info(options, "perf.bench_interference", model, bench, argv)
    rows = [
        (r.metric, figure(r.value), r.unit, f"{figure(min(r.samples))} .. {figure(max(r.samples))}")
        for r in records
    ]
    print(text_table((records[0].workload, "median", "unit", "min .. max"), rows))
    ratio = next(r.value for r in records if r.metric == "interference_ratio")
    passed = ratio <= BAR
    print(
        f"\np99 between tokens over p99 of a chunk: {figure(ratio)}, bar at most {figure(BAR)}: "
        f"{'pass' if passed else 'FAIL'}\n{info.footer()}"
    )
    if options.json is not None:
        write_json(options.json, records, info)
    return EXIT_BELOW_BAR if options.fail_below_bar and not passed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--model", help="a GGUF file; default: the demo model's package")
    add("--threads", type=int, default=2)
    add("--length", type=int, default=4096, help="tokens of the long prompt")
    add("--streams", type=int, default=4)
    add("--budget", type=int, default=512, help="tokens per step")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=0, help="of the prompts")
    add("--json", type=Path, metavar="FILE", help="write the records there")
    add("--allow-busy", action="store_true", help="report although others use the CPU")
    add("--fail-below-bar", action="store_true")
    add("--busy-limit", type=float, default=BUSY_LIMIT, help=argparse.SUPPRESS)
    add("--retries", type=int, default=0, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
