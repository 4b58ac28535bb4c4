"""Overhead of the Python scheduler: ``python -m perf.bench_scheduler [--json FILE]``.

One sample is ``schedule`` plus ``update`` of one step in which every running sequence decodes one
token, at several numbers of running sequences and context lengths. The executor's part (making the
outputs) is not timed. The bars are those of docs/scheduling.md.

``--profile`` runs one setting under cProfile instead.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import statistics
import time
from pathlib import Path

from perf.machine import describe_machine
from perf.records import Record, text_table, write_records
from pocket_backend.api import GenerationRequest, SamplingParams
from pocket_backend.core import (
    ContinuousBatchScheduler,
    ExecuteOutput,
    MemoryInfo,
    SchedulerConfig,
    StepPlan,
)

BLOCK_SIZE = 16
RUNNING = (1, 8, 64, 256)
CONTEXTS = (100, 8000)
BARS = {8: 0.1e-3, 64: 0.5e-3, 256: 1.5e-3}
"""Seconds per step, p50, by running sequences."""
_VOCAB = 50_000


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write records to FILE")
    parser.add_argument("--steps", type=int, default=400, help="timed steps per setting")
    parser.add_argument("--quick", action="store_true", help="the small settings only, few steps")
    parser.add_argument("--profile", action="store_true", help="profile 256 running and stop")
    options = parser.parse_args(arguments)
    if options.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, 256, 100, options.steps)
        profile.print_stats("tottime")
        return 0
    records: list[Record] = []
    rows: list[tuple[str, ...]] = []
    steps = min(options.steps, 20) if options.quick else options.steps
    for context in CONTEXTS[:1] if options.quick else CONTEXTS:
        for running in RUNNING[:2] if options.quick else RUNNING:
            seconds = measure(running, context, steps)
            p50, p99 = statistics.median(seconds), quantile(seconds, 0.99)
            workload = f"decode, context {context}"
            for metric, value in (("step_seconds", p50), ("step_seconds_p99", p99)):
                records.append(
                    Record(
                        "bench_scheduler",
                        "pocketllm",
                        workload,
                        running,
                        metric,
                        value,
                        "s",
                        tuple(seconds) if metric == "step_seconds" else (),
                    )
                )
            bar = BARS.get(running)
            rows.append(
                (
                    workload,
                    str(running),
                    f"{p50 * 1e3:.3f}",
                    f"{p99 * 1e3:.3f}",
                    "-" if bar is None else f"{bar * 1e3:.1f}",
                    "-" if bar is None else ("yes" if p50 <= bar else "NO"),
                )
            )
    header = ("schedule + update", "running", "p50 ms", "p99 ms", "bar ms", "met")
    print(text_table(header, rows))
    print(f"\n{describe_machine().summary()}")
    if options.json is not None:
        write_records(options.json, records)
    return 0


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def measure(running: int, context: int, steps: int) -> list[float]:
    """Seconds of ``schedule`` + ``update``, one per step; all ``running`` sequences decode."""
    warm_up = 50
    length = context + steps + warm_up + BLOCK_SIZE
    memory = MemoryInfo(
        num_blocks=running * (length // BLOCK_SIZE + 2) + 1,
        block_size=BLOCK_SIZE,
        max_slots=running,
        max_context=length + 1,
        max_batch_tokens=running * context,  # all prompts in one step
        vocab_size=_VOCAB,
    )
    scheduler = ContinuousBatchScheduler(memory, SchedulerConfig(watermark=0.0))
    params = SamplingParams(max_tokens=steps + warm_up + BLOCK_SIZE, ignore_eos=True)
    for index in range(running):
        # Prompts differ from their first token on, and output tokens by request: nothing is shared,
        # and sequences cross block boundaries in different steps, as in service.
        stagger = index % BLOCK_SIZE if context > BLOCK_SIZE else 0
        prompt = tuple((index * 7919 + i) % _VOCAB for i in range(context - stagger))
        scheduler.add_request(GenerationRequest(f"request-{index}", prompt, params), now=0.0)
    step = 0
    while True:
        plan = scheduler.schedule(float(step))
        assert plan is not None
        scheduler.update(plan, outputs(plan, step), float(step))
        step += 1
        if plan.num_tokens == running and plan.num_prefill_tokens == 0:
            break
    seconds: list[float] = []
    gc.collect()
    for step in range(step, step + warm_up + steps):  # noqa: B020  (continues the count)
        start = time.perf_counter()
        plan = scheduler.schedule(float(step))
        middle = time.perf_counter()
        assert plan is not None
        results = outputs(plan, step)
        resume = time.perf_counter()
        scheduler.update(plan, results, float(step))
        seconds.append(middle - start + time.perf_counter() - resume)
        assert len(plan.requests) == running
    scheduler.check_integrity()
    return seconds[warm_up:]


def outputs(plan: StepPlan, step: int) -> list[ExecuteOutput]:
    return [
        ExecuteOutput(r.request_id, (step * 31 + r.slot_id) % _VOCAB if r.samples else None)
        for r in plan.requests
    ]


if __name__ == "__main__":
    raise SystemExit(main())
