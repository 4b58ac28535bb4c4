"""The clients' small parts: addresses, retries, import weight."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pocket_client import DeadlineExceededError, OverloadedError, RetryPolicy, ServerError
from pocket_client.options import new_request_id, valid_request_id
from pocket_client.results import stop_reason_of
from pocket_client.retry import Attempts
from pocket_client.transport import Address, parse_address


@pytest.mark.parametrize(
    ("text", "expected", "target"),
    [
        ("127.0.0.1:8001", Address("grpc", "127.0.0.1", 8001, False), "127.0.0.1:8001"),
        ("triton", Address("grpc", "triton", 8001, False), "triton:8001"),
        ("[::1]:7", Address("grpc", "::1", 7, False), "[::1]:7"),
        ("grpcs://a.example:443", Address("grpc", "a.example", 443, True), "a.example:443"),
        ("http://localhost:8000/", Address("http", "localhost", 8000, False), "localhost:8000"),
        ("https://a.example", Address("http", "a.example", 443, True), "a.example:443"),
    ],
)
def test_addresses(text: str, expected: Address, target: str) -> None:
    assert parse_address(text) == expected
    assert parse_address(text).target == target


@pytest.mark.parametrize(
    "text", ["", "ftp://x", "http://", "host:port", "host:99999", "http://x/path", "http://x?a=b"]
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="address: got"):
        parse_address(text)


def test_request_ids() -> None:
    names = {new_request_id() for _ in range(100)}
    assert len(names) == 100
    assert all(valid_request_id(name) for name in names)
    assert not any(valid_request_id(bad) for bad in ("", "a b", "a\n", "ü", "x" * 129))


def test_backoff_grows_up_to_its_maximum() -> None:
    policy = RetryPolicy(attempts=5, initial_seconds=1, factor=2, maximum_seconds=3)
    error = OverloadedError("busy")
    for attempt, limit in ((2, 1), (3, 2), (4, 3), (5, 3)):
        waits = [policy.wait_before(attempt, error, None) for _ in range(50)]
        assert all(wait is not None and limit / 2 <= wait <= limit for wait in waits)
        assert len(set(waits)) > 1  # jitter
    assert policy.wait_before(6, error, None) is None
    assert policy.wait_before(2, ServerError("bug"), None) is None
    assert policy.wait_before(2, error, 0.1) is None  # the deadline comes first


def test_bad_policies_and_timeouts() -> None:
    for bad in ({"attempts": 0}, {"initial_seconds": -1}, {"factor": 0.5}, {"initial_seconds": 9}):
        with pytest.raises(ValueError, match=r"attempts|backoff"):
            RetryPolicy(**bad)  # type: ignore[arg-type]
    for timeout in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="timeout"):
            Attempts(RetryPolicy(), timeout)


def test_deadlines_run_out() -> None:
    attempts = Attempts(RetryPolicy(), 1e-9)
    with pytest.raises(DeadlineExceededError):
        attempts.remaining()
    assert Attempts(RetryPolicy(), None).remaining() is None


def test_an_id_is_a_stop_reason_only_if_it_was_asked_for() -> None:
    assert stop_reason_of("", (1,)) is None
    assert stop_reason_of("7", (7,)) == 7
    assert stop_reason_of("7", (8,)) == "7"
    assert stop_reason_of("x", ()) == "x"
    assert stop_reason_of("²", (2,)) == "²"
    assert stop_reason_of("9" * 5000, (9,)) == "9" * 5000


def test_importing_the_client_loads_neither_the_engine_nor_the_gateway() -> None:
    code = (
        "import sys, pocket_client\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'pocket_backend', 'torch', 'fastapi', 'grpc', 'tritonclient'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
