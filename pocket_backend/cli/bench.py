"""`pocketllm bench`: throughput and latency of an engine in this process, or of a server.

A quick look; `perf/` has the benchmarks that published figures come from. Prompts are random words,
different for each request, so that no prefix is shared; every answer has the same length.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pocket_backend.api import InvalidRequestError
from pocket_backend.cli import console
from pocket_backend.cli.exit_codes import OK
from pocket_backend.cli.options import (
    Commands,
    add_json_option,
    add_source_options,
)
from pocket_backend.cli.session import Answer, Prompt, Session, open_session

_WORDS = (
    *("river", "stone", "window", "garden", "morning", "letter", "engine", "signal", "mountain"),
    *("paper", "harbour", "winter", "question", "market", "silver", "candle", "bridge", "forest"),
    *("number", "story", "island", "weather", "answer", "kitchen", "travel", "machine"),
)
_MAX_CONCURRENCY = 256


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure tokens per second and latencies",
        description="Measure an engine in this process or a server at several concurrencies.",
    )
    parser.add_argument(
        "--concurrency", default="1,4,8", help="requests at a time, by commas (1,4,8)"
    )
    parser.add_argument("--requests", type=int, help="of each (default: twice the concurrency)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each request (128)")
    parser.add_argument("-n", "--max-tokens", type=int, default=64, help="of each answer (64)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' words")
    add_json_option(parser, "records as perf/ writes them")
    add_source_options(parser, positional_model=True)
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for at one concurrency."""

    concurrency: int
    requests: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The answers to one load."""

    load: Load
    seconds: float
    """From the first request to the last answer."""
    answers: tuple[Answer, ...]

    @property
    def output_tokens_per_second(self) -> float:
        return sum(answer.output_tokens for answer in self.answers) / self.seconds

    @property
    def total_tokens_per_second(self) -> float:
        prompts = sum(answer.prompt_tokens for answer in self.answers)
        return self.output_tokens_per_second + prompts / self.seconds

    @property
    def ttfts(self) -> list[float]:
        return [answer.ttft_seconds for answer in self.answers]

    @property
    def inter_token_seconds(self) -> list[float]:
        """Mean time per token after the first, of each answer that has several."""
        return [
            answer.decode_seconds / (answer.output_tokens - 1)
            for answer in self.answers
            if answer.output_tokens > 1
        ]


def run(options: argparse.Namespace) -> int:
    """Print a table, or records.

    Raises:
        PocketLLMError, PocketClientError: options out of range, or a request failed.
    """
    loads = _loads(options)
    with open_session(options) as session:
        words = random.Random(options.seed)  # noqa: S311  (filler text)
        warm_up = Load(1, 1, min(16, options.prompt_tokens), min(4, options.max_tokens))
        measure(session, warm_up, words)
        rows = []
        for load in loads:
            with console.Waiting(f"{load.requests} requests, {load.concurrency} at a time"):
                rows.append(measure(session, load, words))
        name = session.name
    if options.json:
        console.print_json([record for row in rows for record in records(row, name)])
    else:
        _print(rows, name)
    return OK


def _loads(options: argparse.Namespace) -> list[Load]:
    try:
        concurrencies = [int(text) for text in options.concurrency.split(",")]
    except ValueError:
        concurrencies = [0]
    if not all(0 < value <= _MAX_CONCURRENCY for value in concurrencies):
        raise InvalidRequestError(
            f"--concurrency: got {options.concurrency!r}; must be numbers from 1 to "
            f"{_MAX_CONCURRENCY}, separated by commas",
            field="concurrency",
        )
    for name in ("prompt_tokens", "max_tokens", "requests"):
        value = getattr(options, name)
        if value is not None and value < 1:
            flag = "--" + name.replace("_", "-")
            raise InvalidRequestError(f"{flag}: got {value}; must be at least 1", field=name)
    return [
        Load(value, options.requests or 2 * value, options.prompt_tokens, options.max_tokens)
        for value in concurrencies
    ]


def measure(session: Session, load: Load, words: random.Random) -> Measured:
    """Keep ``load.concurrency`` requests open until all are answered.

    Raises:
        PocketLLMError, PocketClientError: the first failure; the other requests are finished first.
    """
    prompts = [_prompt(session, load.prompt_tokens, words) for _ in range(load.requests)]
    sampling = {"max_tokens": load.max_tokens, "temperature": 0.0, "ignore_eos": True}
    failed = threading.Event()
    numbers = itertools.count()

    def worker() -> list[Answer]:
        done: list[Answer] = []
        while (number := next(numbers)) < len(prompts) and not failed.is_set():
            try:
                prompt = Prompt(token_ids=prompts[number])
                done.append(session.ask(prompt, sampling, lambda _text, _tokens: None))
            except BaseException:
                failed.set()
                raise
        return done

    began = time.monotonic()
    with ThreadPoolExecutor(load.concurrency, "bench") as pool:
        workers = [pool.submit(worker) for _ in range(load.concurrency)]
    seconds = time.monotonic() - began
    return Measured(load, seconds, tuple(itertools.chain(*(done.result() for done in workers))))


def _prompt(session: Session, tokens: int, words: random.Random) -> Sequence[int]:
    text = " ".join(words.choice(_WORDS) for _ in range(tokens))
    ids = list(session.tokenize(text))  # a word has at least one token
    return ids[:tokens]


_METRICS = (
    ("output_tokens_per_second", "tokens/s"),
    ("total_tokens_per_second", "tokens/s"),
)


def records(row: Measured, name: str) -> list[dict[str, object]]:
    """In the form of every benchmark here: one record a metric."""
    load = row.load
    common = {
        "bench": "cli",
        "engine": "pocketllm",
        "workload": f"{name} {load.prompt_tokens}+{load.max_tokens}",
        "concurrency": load.concurrency,
    }
    found: list[dict[str, object]] = [
        {**common, "metric": metric, "value": getattr(row, metric), "unit": unit, "samples": 1}
        for metric, unit in _METRICS
    ]
    for metric, values in (("ttft", row.ttfts), ("inter_token", row.inter_token_seconds)):
        for part in (50, 99):
            if values:
                value = {"metric": f"{metric}_p{part}_seconds", "value": quantile(values, part)}
                found.append({**common, **value, "unit": "s", "samples": len(values)})
    return found


def quantile(values: Sequence[float], part: int) -> float:
    """The ``part``-th percentile, interpolated."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[part - 1]


def _print(rows: Sequence[Measured], name: str) -> None:
    load = rows[0].load
    print(f"{name}: prompts of {load.prompt_tokens} tokens, answers of {load.max_tokens}\n")
    print(
        f"{'streams':>7} {'requests':>8} {'new tok/s':>10} {'all tok/s':>10} "
        f"{'TTFT p50':>10} {'TTFT p99':>10} {'ITL p50':>9} {'ITL p99':>9}"
    )
    for row in rows:
        times = [_milliseconds(row.ttfts, part) for part in (50, 99)]
        times += [_milliseconds(row.inter_token_seconds, part) for part in (50, 99)]
        print(
            f"{row.load.concurrency:>7} {row.load.requests:>8} "
            f"{row.output_tokens_per_second:>10.1f} {row.total_tokens_per_second:>10.1f} "
            f"{times[0]:>10} {times[1]:>10} {times[2]:>9} {times[3]:>9}"
        )


def _milliseconds(values: Sequence[float], part: int) -> str:
    return f"{quantile(values, part) * 1000:.1f} ms" if values else "-"
