"""`pocketllm trace`: run prompts in this process and write what every step and slot did.

The file is in the Trace Event Format, for Perfetto and `chrome://tracing`; docs/tracing.md says
how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pocket_backend
from pocket_backend.api import ConfigurationError, InvalidRequestError, SamplingParams
from pocket_backend.cli import console
from pocket_backend.cli.exit_codes import OK
from pocket_backend.cli.options import Commands, add_engine_options, add_json_option, engine_args
from pocket_backend.engine.recording import record_steps
from pocket_backend.observability.chrome_trace import chrome_trace
from pocket_backend.observability.steps import StepRecorder
from pocket_backend.observability.timeline import timelines

if TYPE_CHECKING:
    from pocket_backend.engine.llm import LLM

_MAX_PROMPTS = 1024
_LONG = "The river carries the boats past the old mill, the bridge and the market. "
DEMO_PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    f"Summarise this in one sentence: {_LONG * 60}",
    "Name three prime numbers.",
    "Why is the sky blue?",
    "Translate 'good morning' to Spanish.",
)
"""Short ones, and one that takes several prefill chunks."""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "trace",
        help="run prompts and write a Perfetto trace of steps and slots",
        description="Run prompts on an engine in this process and write a trace of its steps and "
        "slots, to be opened in Perfetto or chrome://tracing.",
    )
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument(
        "-m", "--model", help="a GGUF file or a model directory (default: the installed demo model)"
    )
    parser.add_argument("-f", "--file", type=Path, help="a prompt a line (default: six of our own)")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="trace.json")
    parser.add_argument("-n", "--max-tokens", type=int, default=48, help="of each answer (48)")
    parser.add_argument(
        "--interval", type=float, default=0.0, help="seconds between two prompts (0: all at once)"
    )
    parser.add_argument("--raw", action="store_true", help="continue the text, no chat template")
    add_json_option(parser, "the timelines")
    add_engine_options(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class _Work:
    prompts: tuple[str, ...]
    params: SamplingParams
    interval: float
    raw: bool


def run(options: argparse.Namespace) -> int:
    """Write the file and say what is in it.

    Raises:
        PocketLLMError: options that cannot be used, a model that does not load, a failed request.
    """
    work = _work(options)
    if options.model_argument is not None and options.model is not None:
        raise InvalidRequestError("MODEL and --model: give one of them", field="model")
    options.model = options.model_argument or options.model
    args = engine_args(options)
    recorder = StepRecorder()
    with console.Waiting(f"loading {args.model_path().name}"):
        from pocket_backend.engine.llm import LLM

        llm = LLM(args)
    with llm:
        llm.engine.add_step_hook(record_steps(recorder))
        with console.Waiting(f"running {len(work.prompts)} prompts"):
            _generate(llm, work)
    steps, sequences = recorder.steps, recorder.sequences  # complete: the engine thread has ended
    about = {
        "version": pocket_backend.__version__,
        "model": args.model_path().name,
        "steps_not_kept": recorder.overwritten,
    }
    _write(options.output, chrome_trace(steps, sequences, about))
    seconds = steps[-1].ended - steps[0].began
    if options.json:
        lives = [life.as_dict() for life in timelines(steps, sequences)]
        found = {"file": str(options.output), "steps": len(steps), "seconds": seconds}
        console.print_json({**found, "timelines": lives})
    else:
        print(
            f"{options.output}: {len(sequences)} requests in {len(steps)} steps, {seconds:.2f} s; "
            "open it in Perfetto (ui.perfetto.dev) or chrome://tracing"
        )
    return OK


def _work(options: argparse.Namespace) -> _Work:
    if not 0 <= options.interval <= 60:
        raise InvalidRequestError(
            f"--interval: got {options.interval}; must be from 0 to 60 seconds", field="interval"
        )
    if not options.output.parent.is_dir():  # before the run, not after it
        raise InvalidRequestError(
            f"--output: {options.output}: there is no such directory", field="output"
        )
    return _Work(
        DEMO_PROMPTS if options.file is None else _read_prompts(options.file),
        SamplingParams(max_tokens=options.max_tokens, temperature=0.0),
        options.interval,
        options.raw,
    )


def _read_prompts(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise InvalidRequestError(f"--file: {path}: {reason}", field="file") from None
    prompts = tuple(line for line in lines if line.strip())
    if not 0 < len(prompts) <= _MAX_PROMPTS:
        raise InvalidRequestError(
            f"--file: {path} has {len(prompts)} prompts; must have 1 to {_MAX_PROMPTS}, one a line",
            field="file",
        )
    return prompts


def _generate(llm: LLM, work: _Work) -> None:
    """Submit everything in turn, then wait for all of it.

    Raises:
        PocketLLMError: the first failure; the other requests are cancelled.
    """
    with contextlib.ExitStack() as streams:
        opened = []
        for number, prompt in enumerate(work.prompts):
            if number and work.interval:
                time.sleep(work.interval)
            stream = llm.stream(
                prompt_tokens=_token_ids(llm, prompt, work.raw),
                sampling_params=work.params,
                request_id=f"prompt-{number + 1}",
            )
            opened.append(streams.enter_context(stream))
        for stream in opened:
            for event in stream:
                if event.error is not None:
                    raise event.error


def _token_ids(llm: LLM, prompt: str, raw: bool) -> Sequence[int]:
    tokenizer = llm.tokenizer
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])


def _write(path: Path, document: dict[str, object]) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"))
    except OSError as error:
        raise ConfigurationError(f"--output: {path}: {error.strerror}") from None
