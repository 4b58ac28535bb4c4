"""A server in the foreground: start-up messages, supervision, signals, a drain, a clean stop."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from pocket_backend.cli.examples import examples
from pocket_backend.cli.gateway import GatewayProcess
from pocket_backend.cli.reporter import Reporter
from pocket_backend.observability.logging import configure_logging
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.liveness import LivenessPolicy
from pocket_backend.triton.log_follower import LogFollower
from pocket_backend.triton.supervisor import RestartPolicy, SupervisionPolicy, Supervisor

LOG_KEPT_BYTES = 8 << 20
"""Of a log that was copied to standard error: what failed starts are explained from."""
_STOP_SECONDS = 5.0
"""For Triton to end after a drain, when no request is open any more."""


def add_supervision_options(parser: argparse.ArgumentParser) -> None:
    """Options of ``supervision_policy``."""
    group = parser.add_argument_group("supervision")
    restarts, liveness = RestartPolicy(), LivenessPolicy()
    group.add_argument(
        "--drain-seconds", type=float, default=SupervisionPolicy().drain_seconds,
        help="what open requests get after SIGTERM or Ctrl-C (default %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--max-restarts", type=int, default=restarts.max_restarts,
        help="give up after this many in a row (default %(default)s; 0: never restart)",
    )  # fmt: skip
    group.add_argument(
        "--stable-seconds", type=float, default=restarts.stable_seconds,
        help="service of this long ends such a row (default %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--stall-seconds", type=float, default=liveness.stall_seconds,
        help="a process that something waits for, and that computes nothing, hangs after this "
        "long (default %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--busy-stall-seconds", type=float, default=liveness.busy_stall_seconds,
        help="the same for one that computes, as in a long step (default %(default)g)",
    )  # fmt: skip


def supervision_policy(options: argparse.Namespace) -> SupervisionPolicy:
    """The policy that the parsed options ask for.

    Raises:
        ConfigurationError: a value is out of range.
    """
    return SupervisionPolicy(
        restarts=RestartPolicy(
            max_restarts=options.max_restarts, stable_seconds=options.stable_seconds
        ),
        liveness=LivenessPolicy(
            stall_seconds=options.stall_seconds, busy_stall_seconds=options.busy_stall_seconds
        ),
        drain_seconds=options.drain_seconds,
    )


def serve(
    options: ServerOptions,
    policy: SupervisionPolicy | None = None,
    *,
    gateway_port: int | None = None,
    log_to_stderr: bool = False,
    reporter: Reporter | None = None,
) -> int:
    """Serve until Ctrl-C or SIGTERM, with an OpenAI gateway on ``gateway_port`` (0: a free one).

    ``log_to_stderr``: Triton's log, too; without a log file of its own, it is then not kept.

    Raises:
        EngineError: the server failed too often.
        ConfigurationError: the server or the gateway cannot start like this.
    """
    reporter = reporter or Reporter()
    with running_server(options, reporter) as server, contextlib.ExitStack() as stack:
        if log_to_stderr:
            keep = None if options.log_file is not None else LOG_KEPT_BYTES
            stack.enter_context(
                LogFollower(lambda: server.log_path, sys.stderr.buffer, keep_bytes=keep)
            )
        gateway = None
        if gateway_port is not None:
            gateway = stack.enter_context(
                GatewayProcess(
                    server.grpc_address,
                    host=options.host,
                    port=gateway_port,
                    report=reporter.event,
                )
            )
            reporter.say(f"OpenAI API at {gateway.url}/v1, web console at {gateway.url}/")
        reporter.say(examples(server))
        return wait_for_interrupt(server, policy, gateway, reporter)


@contextlib.contextmanager
def running_server(
    options: ServerOptions, reporter: Reporter | None = None
) -> Iterator[TritonServer]:
    """Start, yield a server that answers, and stop it whatever happens.

    SIGTERM raises KeyboardInterrupt like Ctrl-C.
    """
    reporter = reporter or Reporter()
    configure_logging()
    previous = signal.signal(signal.SIGTERM, _raise_interrupt)
    server = TritonServer(options)
    try:
        started = time.monotonic()
        reporter.say(f"starting Triton with {Path(options.model).name} ...")
        reporter.event("starting", model=str(options.model), pid=os.getpid())
        server.start()
        seconds = time.monotonic() - started
        reporter.say(
            f"ready in {seconds:.1f} s: HTTP {server.http_url}, "
            f"gRPC {server.grpc_address}, metrics {server.metrics_url}"
        )
        reporter.event("started", seconds=round(seconds, 3), **_addresses(server))
        yield server
    finally:
        server.stop()
        signal.signal(signal.SIGTERM, previous)


def wait_for_interrupt(
    server: TritonServer,
    policy: SupervisionPolicy | None = None,
    gateway: GatewayProcess | None = None,
    reporter: Reporter | None = None,
) -> int:
    """Supervise until a signal, then drain and stop. A second signal ends the drain at once.

    The gateway refuses newcomers while the server drains, and still ends its open answers.

    Raises:
        EngineError: the server failed more often than the policy allows.
    """
    reporter = reporter or Reporter()
    supervisor = Supervisor(server, policy, report=reporter.event)
    try:
        reporter.say("serving; Ctrl-C stops")
        openai = None if gateway is None else f"{gateway.url}/v1"
        reporter.event("ready", **_addresses(server), openai_url=openai)
        supervisor.run()
    except KeyboardInterrupt:
        reporter.say("\nstopping: open requests may end (again Ctrl-C: at once) ...")
        reporter.event("stopping")
    if gateway is not None:
        gateway.stop_accepting()
    try:
        supervisor.drain()
    except KeyboardInterrupt:
        reporter.say("\nending open requests ...")
        reporter.event("ending_open_requests")
        with contextlib.suppress(KeyboardInterrupt):
            supervisor.drain(0.0)
    server.stop(_STOP_SECONDS)
    return 0


def _addresses(server: TritonServer) -> dict[str, str]:
    return {
        "http_url": server.http_url,
        "grpc_address": server.grpc_address,
        "metrics_url": server.metrics_url,
    }


def _raise_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("NO_COLOR") is None
