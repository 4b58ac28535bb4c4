"""What holds for every test: a slow machine is no failure, and no test logs for the next one."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from pocket_backend.observability.logging import reset_logging

# Examples and their generation may take any time; pytest's own limit catches what hangs.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell starts background jobs with SIGINT ignored, and processes inherit that: those that tests
# start and interrupt could then not be interrupted. A handler is not inherited; the default is.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def unconfigured_logging() -> Iterator[None]:
    """Entry points configure the log of their process, which here is that of all tests. Reset
    afterwards, too: pytest looks at which loggers propagate before the next test's fixtures run."""
    reset_logging()
    yield
    reset_logging()
