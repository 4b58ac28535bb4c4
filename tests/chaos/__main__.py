"""``python -m tests.chaos --minutes 5``: a supervised server under load, and everything goes wrong.

Its processes are killed and stopped, clients disconnect, flood it and send garbage, in an order
that the seed decides.  Afterwards every request must be accounted for (sent = answered + errored +
cancelled), errors must be near a fault that explains them, every fault must have been healed, and
nothing may be left.  Exit status: 0 passed, 1 failed, 2 it could not begin.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perf.load.ledger import HEADER, Fault, Ledger
from perf.load.mix import Mix, MixedLoad
from perf.machine import describe_machine
from perf.records import markdown_table
from perf.soak import Check, settle
from pocket_backend.triton.shm import SHM_DIR
from pocket_client import Client
from pocket_client.retry import RetryPolicy
from tests.chaos.faults import Assailant, Healing, schedule
from tests.support.served import Served, slowness
from tests.support.triton_clients import generate, processes_mentioning

PATIENCE_SECONDS = 60.0
"""A request without its end after so long is lost."""
NOTICED_BAR, RESTORED_BAR = 5.0, 10.0
"""Seconds, on a machine that is not overloaded."""
_GONE_SECONDS = 20.0
_LOG_TAIL = 4000
"""Characters of the command's output that are shown if the run is stopped."""
_QUIET_SECONDS = (0.5, 2.0)
"""Between two faults."""
_QUESTION = {"text_input": "What is left when all is over?", "max_tokens": 24, "ignore_eos": True}
_TRAFFIC = Mix(
    {
        "grpc": 6, "http": 3, "chat": 3, "leave": 3, "cancel": 1,
        "deadline": 1, "invalid": 1, "garbage": 2, "noise": 1,
    }
)  # fmt: skip
_ENVIRONMENT = {
    "POCKETLLM_MAX_QUEUE": "16",  # so that a flood is refused, and not only slow
    "POCKETLLM_KV_CACHE_TOKENS": "16384",
}


@dataclass(slots=True)
class Run:
    """What happened."""

    ledger: Ledger = field(default_factory=Ledger)
    faults: list[Fault] = field(default_factory=list)
    healings: list[Healing] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    slowness: float = 1.0
    """The largest seen: bars of seconds are multiplied by it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to go on striking")
    parser.add_argument("--seed", type=int, default=0, help="of faults and traffic")
    parser.add_argument("--users", type=int, default=12, help="clients at once, besides floods")
    parser.add_argument("--model", default="fake", help="a GGUF file; default: the fake model")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report (Markdown)")
    options = parser.parse_args(arguments)
    served = Served("--stable-seconds", "0", model=options.model, environment=_ENVIRONMENT)
    try:
        served.__enter__()
    except AssertionError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    run = Run()
    try:
        chaos(served, options, run)
    finally:
        served.__exit__()
    text = report(options, run)
    print(text)
    if options.report is not None:
        options.report.write_text(text + "\n", encoding="utf-8")
    return 0 if all(check.passed for check in run.checks) else 1


def chaos(served: Served, options: argparse.Namespace, run: Run) -> None:
    """Load, strike, stop, judge. ``run`` is filled as it goes."""
    draw = random.Random(options.seed)
    ids = {served.server_id()}
    expected = generate(served.http_url, _QUESTION).text

    def make_load(mix: Mix, users: int) -> MixedLoad:
        return MixedLoad(
            served.grpc_address,
            served.http_url,
            users=users,
            mix=mix,
            seed=draw.getrandbits(32),
            retry=RetryPolicy(attempts=1),  # what happened to each, not how it was repaired
            wait_seconds=PATIENCE_SECONDS,
        )

    load = make_load(_TRAFFIC, options.users)
    load.start()
    assailant = Assailant(served, load.started, run.ledger, make_load)
    run.faults, run.healings = assailant.faults, assailant.healings
    wrong: list[str] = []
    trouble = ""
    try:
        for blow in schedule(draw):
            if time.monotonic() - load.started >= options.minutes * 60:
                break
            print(f"  {time.monotonic() - load.started:6.1f} s  {blow.name}", flush=True)
            assailant.strike(blow)
            run.slowness = max(run.slowness, slowness())
            ids.add(served.server_id())
            reply = generate(served.http_url, _QUESTION)
            if reply.text != expected:
                wrong.append(f"after {blow.name}: {reply.error or reply.text[:40]!r}")
            time.sleep(draw.uniform(*_QUIET_SECONDS))
    except (AssertionError, OSError, KeyError, ValueError) as error:
        trouble = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        print(served.text[-_LOG_TAIL:], file=sys.stderr, flush=True)
    outcomes = load.stop(PATIENCE_SECONDS + 10)
    run.ledger.add(load.sent(), outcomes)
    run.checks += [
        Check("nothing stopped the run", not trouble, trouble or f"{len(run.faults)} faults"),
        judge_accounts(run.ledger),
        judge_errors(run.ledger, run.faults),
        *judge_healings(run.healings, run.slowness),
        Check("the same answer after every fault", not wrong, "; ".join(wrong[:3]) or "it was"),
        judge_baseline(served),
        judge_end(served, ids),
    ]


# --- the verdict ----------------------------------------------------------------------------------


def judge_accounts(ledger: Ledger) -> Check:
    """sent = answered + errored + cancelled."""
    sent, *_, lost = (int(cell) for cell in ledger.rows()[-1][1:])
    passed = sent > 0 and ledger.unaccounted == 0
    detail = f"{sent} sent, {ledger.unaccounted} unaccounted for, {lost} of them lost"
    return Check("every request is accounted for", passed, detail)


def judge_errors(ledger: Ledger, faults: Sequence[Fault]) -> Check:
    """Away from faults, every request ends as its kind should."""
    found = ledger.unexplained(faults)
    detail = "; ".join(f"{o.kind} at {o.at:.1f} s: {o.ended[:120]}" for o in found[:3])
    return Check("errors have a fault that explains them", not found,
                 f"{len(found)}: {detail}" if found else "they have")  # fmt: skip


def judge_healings(healings: Sequence[Healing], slow: float) -> list[Check]:
    """Noticed and restored within the bars, which a busy machine stretches."""
    checks = []
    for name, bar, values in (
        ("noticed", NOTICED_BAR, [healing.noticed for healing in healings]),
        ("restored", RESTORED_BAR, [healing.restored for healing in healings]),
    ):
        known = [value for value in values if value is not None]
        passed = len(known) == len(values) and all(value < bar * slow for value in known)
        longest = f"longest {max(known):.1f} s" if known else "none"
        detail = f"{len(known)} of {len(values)}, {longest}, bar {bar:g} s x {slow:.1f} (load)"
        checks.append(Check(f"every signal is {name} in time", passed, detail))
    return checks


def judge_baseline(served: Served) -> Check:
    """Nothing runs, nothing waits, no block is in use."""
    try:
        with Client(served.grpc_address) as client:
            stats, settled = settle(client)
    except Exception as error:  # noqa: BLE001  (whatever it is, the verdict holds it)
        return Check("server at baseline", False, f"{type(error).__name__}: {str(error)[:200]}")
    return Check("server at baseline", settled, f"{stats['blocks_total']} blocks, none in use"
                 if settled else f"running {stats['running']}, waiting {stats['waiting']}, "
                 f"{stats['blocks_used']} blocks in use")  # fmt: skip


def judge_end(served: Served, server_ids: set[str]) -> Check:
    """SIGTERM ends the command with 0; of all its servers no process and no shared memory stay."""
    served.process.send_signal(signal.SIGTERM)
    try:
        status = served.process.wait(60)
    except Exception as error:  # noqa: BLE001
        return Check("nothing is left behind", False, f"it does not end: {error}")
    deadline = time.monotonic() + _GONE_SECONDS
    while (left := left_of(server_ids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    detail = "; ".join(left[:3]) if left else f"{len(server_ids)} servers, exit status {status}"
    return Check("nothing is left behind", status == 0 and not left, detail)


def left_of(server_ids: set[str]) -> list[str]:
    """Command lines and shared memory regions with one of the ids."""
    return [
        found
        for server_id in server_ids
        for found in (*processes_mentioning(server_id), *map(str, SHM_DIR.glob(f"*{server_id}*")))
    ]


def report(options: argparse.Namespace, run: Run) -> str:
    verdict = "PASSED" if all(check.passed for check in run.checks) else "FAILED"
    facts = (
        f"{options.minutes:g} minutes, seed {options.seed}, {options.users} clients, model "
        f"{Path(options.model).name}, {len(run.faults)} faults. {describe_machine().summary()}."
    )
    checks = [
        (c.name, "passed" if c.passed else "FAILED", c.detail.replace("|", "/")) for c in run.checks
    ]
    healings = [
        (healing.blow, *("never" if t is None else f"{t:.1f}"
                         for t in (healing.noticed, healing.restored)))
        for healing in run.healings
    ]  # fmt: skip
    tables = (
        markdown_table(("check", "verdict", "figures"), checks),
        markdown_table(HEADER, run.ledger.rows()),
        markdown_table(("signal", "noticed, s", "then restored, s"), healings),
    )
    return "\n\n".join((f"# Chaos: {verdict}", facts, *tables))


if __name__ == "__main__":
    raise SystemExit(main())
