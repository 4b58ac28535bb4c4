"""``python -m perf.serve_bench --peers llama.cpp,vllm``: our server beside the peers' own.

Every server gets the same requests at the same moments from the same client (``perf/serving``):
Poisson arrivals at each of ``--rates``, lengths as in shared conversations, streams of
``/v1/completions``, greedy, exactly as many tokens as asked for. Rounds are interleaved: rate by
rate every server has its turn, who begins changes, and peers are stopped outside their turns. Every
request is in a ledger; failed ones count against goodput and are listed.

Exit status: 0; 1 a server failed; 3 other processes used the CPU, so that nothing is published
(``--allow-busy`` reports all the same, marked).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from perf.engines.base import EngineFailure
from perf.engines.environments import ROOT
from perf.machine import BUSY_LIMIT, BusyMonitor, MachineBusyError, describe_machine
from perf.records import Record, text_table
from perf.report import update_section
from perf.run_options import EXIT_BUSY, RunInfo, complain, model_path, pin_to, write_json
from perf.serving.client import Client
from perf.serving.figures import (
    BENCH,
    HEADER,
    Objectives,
    TurnResult,
    errors_of,
    table_rows,
    to_records,
)
from perf.serving.servers import LEFT_OUT, Server, our_server, peer_server
from perf.serving.trace import Planned, poisson_trace

PLOT = Path("assets") / "serve_bench.png"
RETRY_ROUND_STEP = 1000
"""A repeated turn gets a trace of its own: the first try has filled the prefix cache."""
RETRIES = 2
WARM_UP = poisson_trace(-1, -1, 4.0, 4)
_FAKE_OPTIONS = '{"delay_seconds": 0.005, "max_context": 16384, "num_blocks": 8192}'
_FAKE = "fake"

Turns = dict[tuple[str, float], list[TurnResult]]


@dataclass(slots=True)
class Plan:
    """What is measured, and by whom."""

    rates: Sequence[float]
    requests: int
    rounds: int
    seed: int
    monitor: BusyMonitor
    client: Client
    retries: int = RETRIES
    disturbed: list[str] = field(default_factory=list)
    """Turns that stayed disturbed after all retries."""


def measure(servers: Sequence[Server], plan: Plan) -> Turns:
    """All turns of all rounds; the servers have been started."""
    turns: Turns = {(server.name, rate): [] for rate in plan.rates for server in servers}
    for server in servers:
        server.resume()
        plan.client.send(server.url, WARM_UP, server.body)
        server.pause()
    for index in range(plan.rounds):
        for rate in plan.rates:
            begin = index % len(servers)
            for server in [*servers[begin:], *servers[:begin]]:
                turns[server.name, rate].append(_turn(server, plan, rate, index))
        print(f"  round {index + 1} of {plan.rounds} done", flush=True)
    return turns


def _turn(server: Server, plan: Plan, rate: float, index: int) -> TurnResult:
    """One turn; a disturbed one is repeated, the last try is kept."""
    for attempt in range(plan.retries + 1):
        trace = poisson_trace(plan.seed, index + attempt * RETRY_ROUND_STEP, rate, plan.requests)
        result = _try(server, plan, trace)
        if plan.monitor.last_was_quiet():
            return result
    plan.disturbed.append(f"{server.name} at {rate:g}/s, round {index + 1}")
    return result


def _try(server: Server, plan: Plan, trace: Sequence[Planned]) -> TurnResult:
    server.resume()
    try:
        # What the other servers use meanwhile is foreign.
        with plan.monitor.measuring(server.pid, plan.client.pid):
            before = plan.monitor.sample((server.pid,)).own
            ledger = plan.client.send(server.url, trace, server.body)
            used = plan.monitor.sample((server.pid,)).own - before
    finally:
        server.pause()
    return TurnResult(tuple(ledger), used)


def start_all(arguments: argparse.Namespace, model: str, stack: ExitStack) -> list[Server]:
    """Ours and the peers that have a server, started one after the other.

    Raises:
        EngineFailure: one cannot be installed or started.
    """
    fake = _FAKE_OPTIONS if model == _FAKE else None
    servers = [our_server(model, arguments.threads, fake)]
    for name in filter(None, arguments.peers.split(",")):
        if name in LEFT_OUT:
            complain(f"{name} is left out: {LEFT_OUT[name]}")
            continue
        servers.append(peer_server(name, Path(model), arguments.threads, end_of_sequence(model)))
    for server in servers:
        stack.callback(server.stop)
        server.start().pause()
    return servers


def end_of_sequence(model: str) -> int:
    """The token that ends an answer, for servers that must be kept from choosing it."""
    from pocket_backend.text import load_tokenizer

    return min(load_tokenizer(Path(model)).eos_token_ids)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m perf.serve_bench", description=__doc__)
    parser.add_argument("--peers", default="llama.cpp", help="comma list: llama.cpp, vllm")
    parser.add_argument("--model", help="a GGUF file, or `fake`; default: the demo model")
    parser.add_argument("--rates", default="0.5,1,2,4", help="requests a second, a comma list")
    parser.add_argument("--requests", type=int, default=40, help="per turn (default 40)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="for every server (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    parser.add_argument("--slo-ttft", type=float, default=Objectives().ttft, metavar="SECONDS")
    parser.add_argument(
        "--slo-per-token", type=float, default=Objectives().per_token, metavar="SECONDS"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the picture there")
    parser.add_argument(
        "--update-docs", action="store_true", help="rewrite table and picture in docs/benchmarks.md"
    )
    parser.add_argument("--allow-busy", action="store_true", help="although others use the CPU")
    parser.add_argument("--busy-limit", type=float, default=BUSY_LIMIT, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    if arguments.update_docs and arguments.allow_busy:
        parser.error("--update-docs publishes, and --allow-busy is not for publication")
    model = _FAKE if arguments.model == _FAKE else str(model_path(arguments.model))
    rates = [float(rate) for rate in arguments.rates.split(",")]
    objectives = Objectives(arguments.slo_ttft, arguments.slo_per_token)
    machine = describe_machine()
    pin_to(arguments.threads)
    monitor = BusyMonitor(limit=arguments.busy_limit)
    try:
        if not arguments.allow_busy:
            monitor.require_quiet()
        with ExitStack() as stack:
            plan = Plan(
                rates=rates,
                requests=arguments.requests,
                rounds=arguments.rounds,
                seed=arguments.seed,
                monitor=monitor,
                client=stack.enter_context(Client()),
                retries=0 if arguments.allow_busy else RETRIES,
            )
            turns = measure(start_all(arguments, model, stack), plan)
    except MachineBusyError as error:
        complain(f"refused: {error}")
        return EXIT_BUSY
    except EngineFailure as error:
        complain(f"failed: {error}")
        return 1
    records = to_records(turns, objectives)
    info = RunInfo(
        command=" ".join(["python -m perf.serve_bench", *given]),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=machine,
        model=Path(model).name,
        threads=arguments.threads,
        rounds=arguments.rounds,
        seed=arguments.seed,
        publishable=not (arguments.allow_busy or plan.disturbed),
    )
    if arguments.json:
        # Also of a run that is refused below: its file says so, and shows what happened.
        write_json(arguments.json, records, info)
    for line in errors_of(turns):
        complain(line)
    if plan.disturbed and not arguments.allow_busy:
        listed = ", ".join(plan.disturbed[:5])
        complain(f"refused: other processes used the CPU in {len(plan.disturbed)} turns ({listed})")
        return EXIT_BUSY
    publish(arguments, records, rates, objectives, info)
    return 0


def publish(
    arguments: argparse.Namespace,
    records: Sequence[Record],
    rates: Sequence[float],
    objectives: Objectives,
    info: RunInfo,
) -> None:
    """Table, picture, documentation."""
    rows = table_rows(records, rates)
    facts = f"Good: {objectives}. {arguments.requests} requests a turn. {info.footer()}"
    print(f"{text_table(HEADER, rows)}\n\n{facts}")
    docs = ROOT / "docs"
    pictures = [path for path in (arguments.plot,) if path]
    if arguments.update_docs:
        pictures.append(docs / PLOT)
    if pictures:
        from perf.serving.plot import plot_serving

        for picture in pictures:
            plot_serving(picture, records, rates, f"{info.model}, {info.machine.summary()}")
    if arguments.update_docs:
        image = (str(PLOT), "Latency over throughput, and goodput, of all servers in one run")
        update_section(docs / "benchmarks.md", BENCH, [(HEADER, rows)], facts, image)


if __name__ == "__main__":
    sys.exit(main())
