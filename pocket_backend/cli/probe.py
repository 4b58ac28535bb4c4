"""`pocketllm probe`: whether a server can serve, for container health checks and scripts.

Exit status: 0 it can, 4 it cannot (or did not answer in time), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import time

from pocket_backend.cli.console import print_json
from pocket_backend.cli.exit_codes import OK, UNAVAILABLE
from pocket_backend.cli.options import Commands
from pocket_backend.triton import probes


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "probe", help="check a running server; made for container health checks"
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="Triton's HTTP address (default %(default)s)"
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="do a real inference of one token: readiness stays true with a dead model process",
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, help="seconds for everything (default %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=_probe)


def _probe(options: argparse.Namespace) -> int:
    base = options.url.rstrip("/")
    started = time.monotonic()
    problem = check(base, deep=options.deep, timeout=options.timeout)
    seconds = time.monotonic() - started
    if options.json:
        print_json({"ready": problem is None, "deep": options.deep, "url": base,
                    "seconds": round(seconds, 4), "problem": problem})  # fmt: skip
    else:
        print(f"ready ({seconds:.3f} s)" if problem is None else f"not ready: {problem}")
    return OK if problem is None else UNAVAILABLE


def check(base: str, *, deep: bool, timeout: float) -> str | None:
    """None if the server at ``base`` is ready, and with ``deep`` answers an inference; else why."""
    deadline = time.monotonic() + timeout
    try:
        probes.ready(base, timeout)
        if deep:
            probes.infer(base, max(0.001, deadline - time.monotonic()))
    except (OSError, ValueError) as error:
        return probes.reason_of(error) if isinstance(error, OSError) else str(error)
    return None
