"""``python -m perf.bench_torch``: our PyTorch backend beside Transformers, in one process.

Workload A at 8 requests (64 tokens in, 128 out), same weights, same type, rounds interleaved:
ours, ours with linear layers as torch has them (``pack_linear`` off), ``generate`` one by one, and
Transformers' continuous batching (``generate_batch``). The bars: at least 3 times ``generate``, and
no slower than ``generate_batch``.

Exit status 3: the machine was busy; 4: below a bar, with ``--fail-below-bar``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from perf.engines.base import Engine, EngineFailure, EngineOptions
from perf.engines.pocketllm import PocketLLMEngine
from perf.engines.transformers_local import ContinuousBatching, OneByOne
from perf.machine import BUSY_LIMIT, MachineBusyError
from perf.measure import Bench, Sampled, to_records
from perf.records import Record, figure, find, text_table
from perf.run_options import (
    EXIT_BELOW_BAR,
    EXIT_BUSY,
    complain,
    make_bench,
    model_path,
    run_info,
    write_json,
)
from perf.workloads import decode_workload

BENCH = "bench_torch"
OURS = "pocketllm"
UNPACKED = "pocketllm, pack_linear off"
STREAMS = 8
BARS = {OneByOne.name: 3.0, ContinuousBatching.name: 1.0}
"""Our tokens/s over theirs, at least."""
METRIC = "decode_tokens_per_second"


def contestants(dtype: str, *, peers: bool) -> list[tuple[Engine, dict[str, object]]]:
    """Engines with what each needs to start, in the order of a round."""

    def ours(name: str, **options: object) -> tuple[Engine, dict[str, object]]:
        options = {"dtype": dtype, **options}
        return PocketLLMEngine(name), {"backend": "torch", "backend_options": options}

    found = [ours(OURS), ours(UNPACKED, pack_linear=False)]
    if peers:
        one_by_one = OneByOne()
        found += [(one_by_one, {"dtype": dtype}), (ContinuousBatching(one_by_one), {})]
    return found


def measure(
    bench: Bench,
    options: EngineOptions,
    rounds: int,
    engines: Sequence[tuple[Engine, dict[str, object]]],
) -> list[Record]:
    """Records of every engine, in rounds of one run each."""
    workload = decode_workload(STREAMS)
    samples: dict[str, list[Sampled]] = {engine.name: [] for engine, _ in engines}
    try:
        for engine, extra in engines:
            engine.start(
                EngineOptions(options.model, threads=options.threads, max_sequences=STREAMS,
                              max_model_len=256, kv_cache_tokens=8192, extra=extra)
            )  # fmt: skip
            bench.warm_up(engine, [workload])
        for index in range(rounds):
            for engine, _ in engines:
                samples[engine.name] += bench.sample(engine, workload, index)
    finally:
        for engine, _ in engines:
            engine.close()
    return [record for name, found in samples.items() for record in to_records(BENCH, name, found)]


def ratios(records: Sequence[Record]) -> list[tuple[str, float, float]]:
    """(peer, our tokens/s over the peer's, bar)."""
    workload = f"A{STREAMS}"
    mine = find(records, engine=OURS, workload=workload, metric=METRIC)
    found = []
    for peer, bar in BARS.items():
        theirs = find(records, engine=peer, workload=workload, metric=METRIC)
        if mine is not None and theirs is not None:
            found.append((peer, mine.value / theirs.value, bar))
    return found


def packing_gain(records: Sequence[Record]) -> float:
    """Tokens/s with ``pack_linear`` over those without."""
    packed, unpacked = (
        find(records, engine=name, workload=f"A{STREAMS}", metric=METRIC)
        for name in (OURS, UNPACKED)
    )
    if packed is None or unpacked is None:
        raise EngineFailure("both of ours must have run")
    return packed.value / unpacked.value


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m perf.bench_torch", description=__doc__)
    parser.add_argument("--model", help="a directory or a GGUF file; default: the demo model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2, help="for every engine (default 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--no-peers", action="store_true", help="only ours, with and without pack_linear"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--allow-busy", action="store_true", help="not for publication")
    parser.add_argument("--fail-below-bar", action="store_true", help="exit 4 if a bar is missed")
    parser.add_argument("--busy-limit", type=float, default=BUSY_LIMIT, help=argparse.SUPPRESS)
    parser.add_argument("--retries", type=int, default=3, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    model = model_path(arguments.model)
    options = EngineOptions(model=str(model), threads=arguments.threads)
    warnings.simplefilter("ignore")  # Transformers' own deprecations
    try:
        bench = make_bench(arguments, model)
        engines = contestants(arguments.dtype, peers=not arguments.no_peers)
        records = measure(bench, options, arguments.rounds, engines)
        if not arguments.allow_busy:
            bench.require_undisturbed()
    except MachineBusyError as error:
        complain(f"refused: {error}")
        return EXIT_BUSY
    except EngineFailure as error:
        complain(f"failed: {error}")
        return 1
    judged = ratios(records)
    speeds = [record for record in records if record.metric == METRIC]
    print(text_table(("engine", "tokens/s"), [(r.engine, figure(r.value)) for r in speeds]))
    print()
    rows = [
        ("packed over unpacked", f"{packing_gain(records):.2f}", "", ""),
        *((f"ours over {peer}", f"{ratio:.2f}", f"at least {bar:g}",
         "pass" if ratio >= bar else "FAIL")
        for peer, ratio, bar in judged),
    ]  # fmt: skip
    print(text_table(("bar", "measured", "wanted", ""), rows))
    facts = run_info(arguments, "perf.bench_torch", model, bench, given)
    print(f"\n{arguments.dtype}. {facts.footer()}")
    if arguments.json:
        write_json(arguments.json, records, facts)
    missed = arguments.fail_below_bar and any(ratio < bar for _, ratio, bar in judged)
    return EXIT_BELOW_BAR if missed else 0


if __name__ == "__main__":
    sys.exit(main())
