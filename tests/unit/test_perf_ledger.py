"""The account of a load: every request has one end, and a fault excuses only what it explains."""

from __future__ import annotations

from collections import Counter

import pytest

from perf.load.ledger import ANSWERED, CANCELLED, ERRORED, LOST, Fault, Ledger, end_of
from perf.load.mix import OK, Outcome


def failed(kind: str, error: str, at: float = 0.0, seconds: float = 1.0) -> Outcome:
    return Outcome(kind, at, f"{error}: because", seconds=seconds, error=error)


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        (Outcome("grpc", 0.0), ANSWERED),
        (Outcome("chat", 0.0), ANSWERED),
        (Outcome("leave", 0.0), CANCELLED),
        (Outcome("cancel", 0.0), CANCELLED),
        (Outcome("noise", 0.0), CANCELLED),
        (Outcome("deadline", 0.0), ERRORED),
        (Outcome("garbage", 0.0), ERRORED),
        (failed("grpc", "UnavailableError"), ERRORED),
        (failed("leave", "ConnectionResetError"), ERRORED),
        (failed("grpc", "DeadlineExceededError"), LOST),
        (failed("garbage", "TimeoutError"), LOST),
        (Outcome("garbage", 0.0, "URLError: <urlopen error timed out>", error="URLError"), LOST),
        (Outcome("deadline", 0.0, "ended without DeadlineExceededError"), ANSWERED),
    ],
)
def test_every_outcome_has_one_end(outcome: Outcome, end: str) -> None:
    assert end_of(outcome) == end


def test_sums_balance_until_a_request_has_no_end_or_is_lost() -> None:
    ledger = Ledger()
    done = [Outcome("grpc", 0.0), Outcome("leave", 0.0), failed("grpc", "UnavailableError")]
    ledger.add(Counter(grpc=2, leave=1), done)
    assert ledger.unaccounted == 0
    assert ledger.rows() == [
        ("grpc", "2", "1", "1", "0", "0"),
        ("leave", "1", "0", "0", "1", "0"),
        ("all", "3", "1", "1", "1", "0"),
    ]
    ledger.add(Counter(grpc=1), [])
    assert ledger.unaccounted == 1
    ledger.add(Counter(chat=1), [failed("chat", "DeadlineExceededError")])
    assert ledger.unaccounted == 2
    assert ledger.rows()[-1] == ("all", "5", "1", "1", "1", "1")


def unexplained(outcome: Outcome, fault: Fault) -> bool:
    ledger = Ledger()
    ledger.add(Counter({outcome.kind: 1}), [outcome])
    return ledger.unexplained([fault]) == [outcome]


@pytest.mark.parametrize(
    ("at", "seconds", "excused"),
    [(8.0, 1.5, False), (8.0, 2.5, True), (12.0, 1.0, True), (14.0, 9.0, True), (15.5, 1, False)],
)
def test_a_fault_excuses_what_was_open_while_it_lasted(
    at: float, seconds: float, excused: bool
) -> None:
    fault = Fault("kill", began=10.0, ended=15.0)
    outcome = failed("grpc", "UnavailableError", at, seconds)
    assert unexplained(outcome, fault) is not excused


def test_a_flood_excuses_refusals_only_and_nothing_excuses_a_wrong_answer() -> None:
    flood = Fault("flood", 0.0, 10.0, frozenset({"OverloadedError"}))
    assert not unexplained(failed("grpc", "OverloadedError"), flood)
    assert unexplained(failed("grpc", "UnavailableError"), flood)
    wrong = Outcome("grpc", 1.0, "3 tokens came and 4 were counted", seconds=1.0)
    assert unexplained(wrong, Fault("kill", 0.0, 10.0))
    assert Outcome("grpc", 1.0).ended == OK
    assert not unexplained(Outcome("grpc", 99.0), flood)
