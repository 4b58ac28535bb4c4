"""`pocketllm run`: one answer to one prompt, from the command line, a file or standard input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from pocket_backend.api import InvalidRequestError
from pocket_backend.cli import console
from pocket_backend.cli.exit_codes import OK
from pocket_backend.cli.options import (
    Commands,
    add_json_option,
    add_sampling_options,
    add_source_options,
    sampling_of,
)
from pocket_backend.cli.session import Prompt, open_session
from pocket_backend.engine.recording import record_steps
from pocket_backend.observability.steps import StepRecorder
from pocket_backend.observability.timeline import timelines

_MODEL_SUFFIXES = (".gguf", ".safetensors")
_EPILOG = """\
examples:
  pocketllm run "What is the capital of France?"
  git diff | pocketllm run "Write a commit message for this change."
  pocketllm run --raw --max-tokens 16 "The capital of France is"
  pocketllm run --url 127.0.0.1:8001 --json "Hello"
"""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="answer one prompt and exit",
        description="Answer one prompt, in this process or by a running server. Standard input, "
        "if it is no terminal, follows the prompt.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt_argument", nargs="?", metavar="PROMPT", help="- is standard input")
    parser.add_argument("-p", "--prompt", help="the same as PROMPT")
    parser.add_argument("-f", "--file", type=Path, help="read the prompt from a file")
    parser.add_argument("-sys", "--system", help="system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the text, no chat template")
    parser.add_argument("--stats", action="store_true", help="print counts and times on stderr")
    add_json_option(parser, "the answer")
    parser.add_argument(
        "--timeline", action="store_true", help="with --json: when it queued, prefilled and decoded"
    )
    add_source_options(parser, positional_model=False)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the answer as it comes, or all of it as JSON.

    Raises:
        PocketLLMError, PocketClientError: there is no answer.
    """
    sampling = sampling_of(options, temperature=0.0)
    prompt = _prompt(options)
    if options.timeline:
        _check_timeline(options)
    if options.json:
        return _run_json(options, prompt, sampling)
    with open_session(options) as session:
        answer = session.ask(prompt, sampling, lambda text, _tokens: console.write(text))
        if not answer.text.endswith("\n"):
            console.write("\n")
        if options.stats:
            console.note(answer.summary())
    return OK


def _run_json(options: argparse.Namespace, prompt: Prompt, sampling: Mapping[str, object]) -> int:
    recorder = StepRecorder()
    hooks = [record_steps(recorder)] if options.timeline else []
    with open_session(options, hooks) as session:
        answer = session.ask(prompt, sampling, lambda _text, _tokens: None)
    document = {"model": session.name, **answer.as_dict()}
    if options.timeline:  # complete now that the session is closed
        [life] = timelines(recorder.steps, recorder.sequences)
        document["timeline"] = life.as_dict()
    console.print_json(document)
    return OK


def _check_timeline(options: argparse.Namespace) -> None:
    if not options.json:
        raise InvalidRequestError("--timeline: only goes with --json", field="timeline")
    if options.url is not None:
        raise InvalidRequestError(
            "--timeline: does not go with --url; docs/tracing.md says how to trace a server",
            field="timeline",
        )


def _prompt(options: argparse.Namespace) -> Prompt:
    text = _text(options)
    if options.raw:
        if options.system is not None:
            raise InvalidRequestError("--system: does not go with --raw", field="system")
        return Prompt(text=text)
    messages = [{"role": "user", "content": text}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    return Prompt(messages=messages)


def _text(options: argparse.Namespace) -> str:
    given = [
        part
        for part in (options.prompt_argument, options.prompt, _file_text(options.file))
        if part is not None
    ]
    if len(given) > 1:
        raise InvalidRequestError("PROMPT, --prompt and --file: give one of them", field="prompt")
    if options.prompt_argument is not None and _is_model_file(options.prompt_argument):
        raise InvalidRequestError(
            f"PROMPT: {options.prompt_argument} is a model file; give it as --model", field="prompt"
        )
    parts = [part for part in given if part != "-"]
    if "-" in given or not sys.stdin.isatty():
        parts.append(sys.stdin.read().rstrip("\n"))
    text = "\n\n".join(part for part in parts if part)
    if not text:
        raise InvalidRequestError(
            "PROMPT: there is none; give one as argument, with --file or on standard input",
            field="prompt",
        )
    return text


def _file_text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise InvalidRequestError(f"--file: {path}: {reason}", field="file") from None


def _is_model_file(text: str) -> bool:
    return text.endswith(_MODEL_SUFFIXES) and Path(text).is_file()
