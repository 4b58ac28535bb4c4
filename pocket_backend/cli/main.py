"""Entry point of `pocketllm`: parses arguments and turns errors into one sentence and a status.

Statuses are in `exit_codes`. With `--json`, an error is an object on standard output, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pocket_backend.cli import bench, chat, completion, inspect, models, probe, run, trace
from pocket_backend.cli.console import note, print_json
from pocket_backend.cli.exit_codes import FAILED, INTERRUPTED, status_of
from pocket_backend.cli.options import (
    add_engine_options,
    add_json_option,
    engine_environment,
    model_path,
)
from pocket_backend.cli.reporter import Reporter
from pocket_backend.cli.serving import add_supervision_options, supervision_policy
from pocket_backend.triton.launcher import ServerOptions
from pocket_backend.triton.ports import Ports

_COMMANDS = (run, chat, inspect, models, bench, trace, probe, completion)
"""Modules of commands: `add_parser` and what it points to."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    status = _run(options)
    if getattr(options, "events", False):
        Reporter(as_json=options.json).event("exit", status=status)
    return status


def _run(options: argparse.Namespace) -> int:
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        note("\ninterrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, as in `pocketllm ... | head`
        sys.stderr.close()
        return FAILED
    except Exception as error:
        found = status_of(error)
        if found is None:
            raise
        if getattr(options, "json", False):
            what = {"type": type(error).__name__, "message": str(error)}
            if getattr(options, "events", False):
                Reporter(as_json=True).event("error", error=what)
            else:
                print_json({"error": what})
        note(f"error: {error}")
        return found
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pocketllm", description="Large language models on Triton Inference Server."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="serve a model until Ctrl-C")
    serve.add_argument("model", nargs="?", help="a GGUF file (default: the installed demo model)")
    _add_server_options(serve)
    serve.add_argument(
        "--gateway-port", type=int, metavar="PORT",
        help="an OpenAI gateway there, too (0 picks a free port; docs/gateway.md)",
    )  # fmt: skip
    serve.set_defaults(run=_serve, events=True)

    for command in _COMMANDS:
        command.add_parser(commands)

    demo = commands.add_parser(
        "demo", help="serve a model, stream one answer, print examples, go on serving"
    )
    demo.add_argument("--model", help="a GGUF file (default: the installed demo model)")
    demo.add_argument("--once", action="store_true", help="stop after the answer")
    demo.add_argument("--prompt", default="What is the capital of France?", help="the question")
    demo.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    _add_server_options(demo)
    demo.set_defaults(run=_demo, events=True)

    doctor = commands.add_parser("doctor", help="check whether this machine can serve")
    doctor.add_argument("--model", help="a GGUF file (default: the installed demo model)")
    doctor.add_argument("--json", action="store_true", help="the checks as one JSON object")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        server.add_argument(
            f"--{name}-port", type=int, default=port, help=f"default {port}; 0 picks a free one"
        )
    server.add_argument("--model-repository", type=Path, help="another model repository")
    server.add_argument("--log-file", type=Path, help="where Triton's log goes")
    server.add_argument(
        "--log-stderr", action="store_true", help="Triton's log to standard error, for containers"
    )
    server.add_argument("--log-verbose", type=int, default=0, help="Triton's log level")
    server.add_argument(
        "--start-timeout", type=float, default=180.0, help="seconds until it must answer"
    )
    add_json_option(parser, "events, one a line,")
    add_supervision_options(parser)
    add_engine_options(parser)


def server_options(options: argparse.Namespace) -> ServerOptions:
    """ServerOptions from parsed arguments.

    Raises:
        ConfigurationError: no model was given and none is installed, or a port is out of range.
    """
    return ServerOptions(
        model=model_path(options.model),
        host=options.host,
        ports=Ports(options.http_port, options.grpc_port, options.metrics_port),
        model_repository=options.model_repository,
        environment=engine_environment(options),
        log_file=options.log_file,
        log_verbose=options.log_verbose,
        start_timeout=options.start_timeout,
    )


def _serve(options: argparse.Namespace) -> int:
    from pocket_backend.cli.serving import serve

    return serve(
        server_options(options),
        supervision_policy(options),
        gateway_port=options.gateway_port,
        log_to_stderr=options.log_stderr,
        reporter=Reporter(as_json=options.json),
    )


def _demo(options: argparse.Namespace) -> int:
    from pocket_backend.cli.demo import demo

    return demo(
        server_options(options),
        prompt=options.prompt,
        max_tokens=options.max_tokens,
        once=options.once,
        policy=supervision_policy(options),
        reporter=Reporter(as_json=options.json),
    )


def _doctor(options: argparse.Namespace) -> int:
    from pocket_backend.cli.doctor import doctor

    return doctor(options.model, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
