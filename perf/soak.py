"""``python -m perf.soak --hours N``: a server under mixed load with faults, for long.

First every KV block is used once, since the pool's memory is taken when it is first written
(``perf/load/fill.py``). Then clients of every kind (``perf/load/mix.py``) run against one Triton
server while its memory, shared memory, file descriptors, threads and latencies are watched.
Afterwards the server must be at
baseline: nothing running, no block in use, the accounting sound, and its counters equal to the
clients' ledger. The verdict is the exit status: 0 passed, 1 failed. A run that is too short, or in
which a kind of client hardly came to anything, does not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perf.load.fill import Fill, fill_pool
from perf.load.mix import OK, Mix, MixedLoad, Outcome
from perf.load.resources import Resources, read_resources
from perf.machine import BusyMonitor, describe_machine
from perf.records import markdown_table
from pocket_backend.api import ConfigurationError
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports
from pocket_backend.triton.settings import FAKE_MODEL, find_default_model
from pocket_client import Client, PocketClientError

RSS_GROWTH_LIMIT = 0.03
"""Of the second quarter's level, beyond ``RSS_SLACK_BYTES``."""
RSS_SLACK_BYTES = 16 * 2**20
LATENCY_DRIFT_LIMIT = 1.5
"""Last third over first, of medians. On a machine that others use this says little."""
SETTLE_SECONDS = 60.0
SHORTEST_MINUTES = 15.0
"""Less shows growth only where it is steep."""
FEWEST_OF_A_KIND = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment."""

    seconds: float
    resources: Resources
    blocks_ok: bool
    """free + used + cached = total."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict."""

    name: str
    passed: bool
    detail: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--hours", type=float, default=1 / 3, help="how long (default: 20 minutes)")
    parser.add_argument("--users", type=int, default=12, help="clients at once")
    parser.add_argument("--model", help="a GGUF file, or `fake`; default: the demo model")
    parser.add_argument("--kv-tokens", type=int, default=16384, help="size of the KV pool")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report (Markdown)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write samples and checks")
    options = parser.parse_args(arguments)
    model = options.model or find_default_model()
    if model is None:
        print("soak: no model; give --model FILE.gguf or --model fake", file=sys.stderr)
        return 2
    # A small pool: it is filled in seconds, and blocks are evicted all the time.
    environment = {"POCKETLLM_KV_CACHE_TOKENS": str(options.kv_tokens)}
    if model == FAKE_MODEL:
        environment["POCKETLLM_FAKE_OPTIONS"] = '{"delay_seconds": 0.005}'
    server = TritonServer(ServerOptions(str(model), ports=Ports(0, 0, 0), environment=environment))
    try:
        with server:
            run = soak(server, options)
    except ConfigurationError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    text = report(options, run)
    print(text)
    if options.report is not None:
        options.report.write_text(text + "\n", encoding="utf-8")
    if options.json is not None:
        content = {
            "fill": asdict(run.fill),
            "foreign_share": run.foreign_share,
            "samples": [asdict(sample) for sample in run.samples],
            "checks": [asdict(check) for check in run.checks],
            "outcomes": Counter(f"{o.kind}: {o.ended}" for o in run.outcomes),
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if run.passed else 1


@dataclass(frozen=True, slots=True)
class Run:
    """What happened, and what is to be said about it."""

    fill: Fill
    filled: Resources
    """After the fill, before the load."""
    samples: list[Sample]
    outcomes: list[Outcome]
    checks: list[Check]
    foreign_share: float
    """Of the CPU, that other processes used under the load: latencies mean little if it is high."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def soak(server: TritonServer, options: argparse.Namespace) -> Run:
    """Fill the pool, load, watch, stop, judge."""
    client = Client(server.grpc_address)
    fill = fill_pool(client, seed=options.seed)
    filled = read_resources(os.getpid(), server.server_id)
    load = MixedLoad(server.grpc_address, server.http_url, users=options.users, seed=options.seed)
    before = client.stats(timeout=30.0)
    samples: list[Sample] = []
    unanswered = 0
    others = BusyMonitor()
    with others.measuring():
        started = time.monotonic()
        load.start()
        while (elapsed := time.monotonic() - started) < options.hours * 3600:
            time.sleep(min(options.every, max(0.0, options.hours * 3600 - elapsed)))
            try:
                samples.append(take_sample(server, client, time.monotonic() - started))
            except PocketClientError:
                unanswered += 1
                continue
            if sys.stderr.isatty():
                print(progress(samples[-1]), end="", file=sys.stderr, flush=True)
        outcomes = load.stop()
    after, settled = settle(client)
    checks = [
        Check("every KV block was used before the load", fill.complete,
              f"{fill.blocks_left} of {fill.blocks_total} unused after {fill.requests} prompts"),
        judge_effort(options.hours, Mix().weights, outcomes),
        *judge_outcomes(outcomes),
        Check("statistics were always answered", not unanswered, f"{unanswered} were not"),
        *judge_resources(samples),
        judge_latency("time to first token", outcomes, lambda outcome: outcome.ttft),
        judge_latency("time per token", outcomes, lambda outcome: outcome.per_token),
        Check("server at baseline", settled, "nothing runs, no block in use" if settled else
              f"after {SETTLE_SECONDS:.0f} s: {_state(after)}"),
        judge_ledger(outcomes, before, after),
        judge_endpoint(server, after),
    ]  # fmt: skip
    client.close()
    return Run(fill, filled, samples, outcomes, checks, others.last.foreign_share)


def take_sample(server: TritonServer, client: Client, seconds: float) -> Sample:
    stats = client.stats(timeout=60.0)
    blocks = [_number(stats, f"blocks_{state}") for state in ("free", "used", "cached")]
    return Sample(
        seconds,
        read_resources(os.getpid(), server.server_id),
        sum(blocks) == _number(stats, "blocks_total") and _number(stats, "integrity_failures") == 0,
    )


def settle(client: Client) -> tuple[dict[str, object], bool]:
    """Statistics once the server is idle; false if it does not get there."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        stats = client.stats(timeout=60.0)
        idle = all(
            _number(stats, name) == 0
            for name in ("running", "waiting", "open_streams", "blocks_used", "integrity_failures")
        )
        if idle or time.monotonic() > deadline:
            return stats, idle
        time.sleep(0.1)


# --- the verdict ----------------------------------------------------------------------------------


def judge_effort(hours: float, kinds: Iterable[str], outcomes: Sequence[Outcome]) -> Check:
    """Whether there was enough of everything for the other checks to mean something."""
    ran = Counter(outcome.kind for outcome in outcomes)
    rare = [f"{ran[kind]} of {kind}" for kind in sorted(kinds) if ran[kind] < FEWEST_OF_A_KIND]
    short = hours * 60 < SHORTEST_MINUTES
    detail = "; ".join(
        [f"{hours * 60:.1f} minutes"]
        + ([f"fewer than {SHORTEST_MINUTES:.0f}"] if short else [])
        + ([f"too few requests: {', '.join(rare)}"] if rare else [])
    )
    return Check("long and mixed enough", not short and not rare, detail)


def judge_outcomes(outcomes: Sequence[Outcome]) -> list[Check]:
    bad = Counter(f"{o.kind}: {o.ended}" for o in outcomes if o.ended != OK)
    detail = "; ".join(f"{count} x {what}" for what, count in bad.most_common(5))
    return [Check("every request ended as it should", bool(outcomes) and not bad,
                  detail or f"{len(outcomes)} requests")]  # fmt: skip


def judge_resources(samples: Sequence[Sample]) -> list[Check]:
    """Growth from the second quarter of the run to the last: the first one is warm-up, in which
    every kind of request comes for the first time, and as many at once as there are clients."""
    quarter = len(samples) // 4
    if quarter < 2:
        return [Check("nothing grows", False, f"{len(samples)} samples are too few; run longer")]

    def levels(read: Callable[[Resources], int]) -> tuple[float, float]:
        values = [read(sample.resources) for sample in samples]
        return statistics.median(values[quarter : 2 * quarter]), statistics.median(
            values[-quarter:]
        )

    rss_early, rss_late = levels(lambda r: r.rss_bytes)
    allowed = rss_early * (1 + RSS_GROWTH_LIMIT) + RSS_SLACK_BYTES
    checks = [Check("memory does not grow", rss_late <= allowed,
                    f"{rss_early / 2**20:.1f} to {rss_late / 2**20:.1f} MiB, "
                    f"{mib_per_hour(samples[len(samples) // 2 :]):+.0f} MiB/h in the second half")
              ]  # fmt: skip
    for name, read, slack in (
        ("shared memory", lambda r: r.shm_bytes, 0),
        ("file descriptors", lambda r: r.file_descriptors, 8),
        ("threads", lambda r: r.threads, 4),
        ("processes", lambda r: r.processes, 0),
    ):
        early, late = levels(read)
        passed = late <= early + slack
        verb = "do" if name.endswith("s") else "does"
        checks.append(Check(f"{name} {verb} not grow", passed, f"{early:g} to {late:g}"))
    wrong = sum(not sample.blocks_ok for sample in samples)
    checks.append(
        Check("KV blocks always add up", wrong == 0, f"{wrong} of {len(samples)} samples")
    )
    return checks


def mib_per_hour(samples: Sequence[Sample]) -> float:
    """Resident memory's slope, by least squares."""
    if len(samples) < 2:
        return 0.0
    fit = statistics.linear_regression(
        [sample.seconds / 3600 for sample in samples],
        [sample.resources.rss_bytes / 2**20 for sample in samples],
    )
    return fit.slope


def judge_latency(
    name: str, outcomes: Sequence[Outcome], read: Callable[[Outcome], float | None]
) -> Check:
    """Median of the last third over that of the first."""
    values = [value for outcome in outcomes if (value := read(outcome)) is not None]
    third = len(values) // 3
    if third < 5:
        return Check(f"{name} does not drift", False, f"{len(values)} values are too few")
    early, late = statistics.median(values[:third]), statistics.median(values[-third:])
    return Check(f"{name} does not drift", late <= early * LATENCY_DRIFT_LIMIT,
                 f"{early * 1e3:.1f} to {late * 1e3:.1f} ms")  # fmt: skip


def judge_ledger(
    outcomes: Sequence[Outcome], before: dict[str, object], after: dict[str, object]
) -> Check:
    """Requests that ended well are exactly the server's `stop` and `length`, unless a client left
    or was cancelled after its request's last token. All together are those that must have reached
    the engine, and at most those that may have. Tokens read were counted."""

    def moved(*reasons: str) -> int:
        return sum(_finished(after, reason) - _finished(before, reason) for reason in reasons)

    def sent(*kinds: str, ended: str | None = None) -> int:
        return sum(o.kind in kinds and ended in (None, o.ended) for o in outcomes)

    served = sent("grpc", "http", "chat", "long", ended=OK)
    whole, ended = moved("stop", "length"), moved("stop", "length", "cancelled", "error")
    generated = _number(after, "generated_tokens") - _number(before, "generated_tokens")
    read = sum(outcome.tokens for outcome in outcomes)
    cancelled = sent("cancel", ended=OK)
    failed = sum(outcome.ended != OK for outcome in outcomes)
    passed = (
        served <= whole <= served + sent("leave", "cancel", "deadline")
        and served + cancelled <= ended
        and ended <= served + cancelled + sent("leave", "deadline") + failed
        and read <= generated
    )
    return Check(
        "counters agree with the clients",
        passed,
        f"{whole} counted, {served} read to the end; {ended} ended in any way; "
        f"{generated} tokens counted, {read} read",
    )


def judge_endpoint(server: TritonServer, stats: dict[str, object]) -> Check:
    """What Prometheus would scrape is what the engine counted."""
    wanted = f'pocket_tokens_total{{type="generated"}} {stats["generated_tokens"]}'
    deadline = time.monotonic() + 20.0
    while True:
        with urllib.request.urlopen(server.metrics_url, timeout=20) as answer:
            found = wanted in answer.read().decode().splitlines()
        if found or time.monotonic() > deadline:
            return Check("the metrics endpoint agrees with the engine", found, wanted)
        time.sleep(0.2)


def report(
    options: argparse.Namespace,
    run: Run,
) -> str:
    outcomes = run.outcomes
    kinds = Counter(outcome.kind for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    rows = [
        (c.name, "passed" if c.passed else "FAILED", c.detail.replace("|", "/")) for c in run.checks
    ]
    verdict = "PASSED" if run.passed else "FAILED"
    mixture = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    facts = (
        f"{options.hours * 60:.1f} minutes, {options.users} clients, {len(outcomes)} requests "
        f"({mixture}), {tokens} tokens read, {len(run.samples)} samples. "
        f"Before, {run.fill.requests} prompts used every KV block once, in "
        f"{run.fill.seconds:.0f} s; then the server held {run.filled.rss_bytes / 2**20:.1f} MiB. "
        f"Other processes used {run.foreign_share:.0%} of the CPU under the load. "
        f"{describe_machine().summary()}."
    )
    table = markdown_table(("check", "verdict", "figures"), rows)
    return "\n".join((f"# Soak: {verdict}", "", facts, "", table))


def progress(sample: Sample) -> str:
    resources = sample.resources
    return (
        f"\r{sample.seconds / 60:6.1f} min  {resources.rss_bytes / 2**20:7.1f} MiB  "
        f"{resources.file_descriptors} fds  "
    )


def _number(stats: dict[str, object], name: str) -> int:
    value = stats[name]
    assert isinstance(value, int), name
    return value


def _finished(stats: dict[str, object], reason: str) -> int:
    requests = stats["requests"]
    assert isinstance(requests, dict)
    count = requests.get(reason, 0)
    assert isinstance(count, int)
    return count


def _state(stats: dict[str, object]) -> str:
    shown = ("running", "waiting", "open_streams", "blocks_used", "integrity_failures")
    return ", ".join(f"{name} {stats[name]}" for name in shown)


if __name__ == "__main__":
    raise SystemExit(main())
