"""``python -m perf.analyzer``: NVIDIA's perf_analyzer sweeps concurrency over the ensemble.

Over gRPC (bidirectional streaming) and over HTTP (server-sent events of ``generate_stream``).
After every level the requests and tokens of the client's export must be exactly what the server's
counters moved by. Prompts and lengths are drawn as in shared conversations, a function of
``--seed``, protocol and level, so that no level finds another's prompts in the prefix cache.

Status: 0 all counts agree; 1 they do not, or a run failed; 2 something is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from perf.analyzer import install
from perf.analyzer.export import ExportError, read_export
from perf.analyzer.figures import (
    BENCH,
    HEADER,
    Account,
    account_of,
    differences,
    scrape,
    table_rows,
    to_records,
)
from perf.engines.base import EngineFailure
from perf.engines.environments import ROOT
from perf.locust.traffic import Lengths, text
from perf.machine import BusyMonitor, describe_machine
from perf.records import Record, markdown_table, text_table, write_records
from pocket_backend.api import ConfigurationError
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports
from pocket_backend.triton.settings import FAKE_MODEL, find_default_model
from pocket_client import Client

PROTOCOLS = ("grpc", "http")
RUN_SECONDS = 900
COUNTERS_SECONDS = 20.0
"""The server writes its counters once a second; a busy machine gets more."""
_FAKE_OPTIONS = '{"delay_seconds": 0.005, "max_context": 16384, "num_blocks": 8192}'


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.analyzer", description=(__doc__ or "").split("\n\n", 1)[0]
    )
    parser.add_argument("--model", help="a GGUF file, or `fake`; default: the demo model")
    parser.add_argument("--protocols", default=",".join(PROTOCOLS), help="comma list: grpc, http")
    parser.add_argument("--concurrency", default="1,2,4,8", help="levels, a comma list")
    parser.add_argument("--requests", type=int, default=32, help="per level (default 32)")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer (default 96)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and lengths")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "perf-analyzer",
        help="inputs, exports, report.md, records.json and sweep.png (default build/perf-analyzer)",
    )
    parser.add_argument(
        "--perf-analyzer", type=Path, metavar="FILE", help="another one; default: the pinned wheel"
    )
    parser.add_argument("--no-plot", action="store_true", help="no picture")
    options = parser.parse_args(arguments)
    model = options.model or find_default_model()
    if model is None:
        print(f"{BENCH}: no model; give --model FILE.gguf or --model fake", file=sys.stderr)
        return 2
    levels = [int(level) for level in options.concurrency.split(",")]
    protocols = options.protocols.split(",")
    if min(levels) < 1 or options.requests < max(levels) or not set(protocols) <= set(PROTOCOLS):
        parser.error(
            "--concurrency takes numbers from 1 to --requests, --protocols takes grpc and http"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    environment = {"POCKETLLM_FAKE_OPTIONS": _FAKE_OPTIONS} if model == FAKE_MODEL else {}
    try:
        analyzer = (
            install.check(options.perf_analyzer) if options.perf_analyzer else install.installed()
        )
        print(f"perf_analyzer {analyzer.version}", flush=True)
        monitor = BusyMonitor()
        with (
            TritonServer(
                ServerOptions(str(model), ports=Ports(0, 0, 0), environment=environment)
            ) as server,
            monitor.measuring(),
        ):
            records, wrong = sweep(server, analyzer, protocols, levels, options)
    except (ConfigurationError, EngineFailure) as error:
        print(f"{BENCH}: {error}", file=sys.stderr)
        return 2
    facts = (
        f"{Path(model).name}, perf_analyzer {analyzer.version}; other processes used "
        f"{monitor.last.foreign_share:.0%} of the CPU. {describe_machine().summary()}."
    )
    publish(options, facts, records, wrong)
    return 1 if wrong or not records else 0


def sweep(
    server: TritonServer,
    analyzer: install.Analyzer,
    protocols: Sequence[str],
    levels: Sequence[int],
    options: argparse.Namespace,
) -> tuple[list[Record], list[str]]:
    """Figures of every level, and what was wrong with any."""
    records: list[Record] = []
    wrong: list[str] = []
    with Client(server.grpc_address) as control:
        for protocol in protocols:
            for level in levels:
                name = f"{protocol} at {level}"
                try:
                    before = steady(server.metrics_url, control)
                    requests = read_export(run(server, analyzer, protocol, level, options))
                    counted = steady(server.metrics_url, control) - before
                except (EngineFailure, ExportError) as error:
                    wrong.append(f"{name}: {error}")
                    continue
                mine = account_of(requests)
                found = differences(mine, counted, options.requests)
                wrong += [f"{name}: {sentence}" for sentence in found]
                if requests:
                    records += to_records(protocol, level, requests)
                verdict = "DISAGREE" if found else "agree"
                print(f"  {name}: counts {verdict}: {mine}", flush=True)
    return records, wrong


def run(
    server: TritonServer,
    analyzer: install.Analyzer,
    protocol: str,
    level: int,
    options: argparse.Namespace,
) -> Path:
    """One level; the path of its export.

    Raises:
        EngineFailure: perf_analyzer failed; the message has its last lines.
    """
    stem = options.folder / f"{protocol}-{level}"
    data, export = stem.with_suffix(".input.json"), stem.with_suffix(".export.json")
    export.unlink(missing_ok=True)
    draw = random.Random(f"{options.seed}-{protocol}-{level}")
    data.write_text(json.dumps(input_data(protocol, draw, options.requests, options.max_tokens)))
    command = [
        str(analyzer.program), "-m", "pocketllm", *target(protocol, server), "--async",
        "--input-data", str(data), "--concurrency-range", str(level),
        "--request-count", str(options.requests), "--profile-export-file", str(export),
    ]  # fmt: skip
    log = stem.with_suffix(".log")
    with log.open("w", encoding="utf-8") as out:
        out.write(" ".join(command) + "\n")
        out.flush()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **analyzer.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=RUN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineFailure(f"no end within {RUN_SECONDS} s; see {log}") from error
    if done.returncode != 0 or not export.exists():
        last = " / ".join(log.read_text(encoding="utf-8").splitlines()[-5:])
        raise EngineFailure(f"perf_analyzer ended with status {done.returncode}: {last[:600]}")
    return export


def target(protocol: str, server: TritonServer) -> list[str]:
    """The options that say where to and how."""
    if protocol == "grpc":
        return ["-i", "grpc", "-u", server.grpc_address, "--streaming"]
    # Its own HTTP client refuses decoupled models. The one for OpenAI servers posts a JSON body and
    # reads server-sent events, whatever the path.
    return ["-i", "http", "-u", server.http_url, "--service-kind", "openai",
            "--endpoint", "v2/models/pocketllm/generate_stream"]  # fmt: skip


def input_data(
    protocol: str, draw: random.Random, count: int, max_tokens: int
) -> dict[str, object]:
    """perf_analyzer's input file: one entry per request."""
    lengths = Lengths(prompt_max=400, output_max=max_tokens)
    bodies = []
    for _ in range(count):
        words, tokens = lengths.draw(draw)
        bodies.append(
            {
                "text_input": text(draw, words),
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0.0,
                "return_num_input_tokens": True,
                "return_num_output_tokens": True,
                "return_finish_reason": True,
            }
        )
    if protocol == "grpc":
        return {"data": [{name: [value] for name, value in body.items()} for body in bodies]}
    return {"data": [{"payload": [body]} for body in bodies]}


def steady(url: str, client: Client) -> Account:
    """The server's counters when nothing runs and the endpoint has what the engine counted.

    Without that, a request of a moment ago (the launcher's own, the last of a level) could be
    counted in the next level, or never.

    Raises:
        EngineFailure: they do not come to rest.
    """
    deadline = time.monotonic() + COUNTERS_SECONDS
    while True:
        stats = client.stats(timeout=COUNTERS_SECONDS)
        requests = stats["requests"]
        assert isinstance(requests, dict)
        account = scrape(url)
        ended, generated = sum(requests.values()), stats["generated_tokens"]
        if (
            stats["open_streams"] == 0
            and account.generated_tokens == generated
            and account.ended == ended
        ):
            return account
        if time.monotonic() > deadline:
            raise EngineFailure(
                f"after {COUNTERS_SECONDS:.0f} s the endpoint has {account}, the engine "
                f"{ended} ended requests, {generated} tokens, {stats['open_streams']} open streams"
            )
        time.sleep(0.2)


def publish(
    options: argparse.Namespace,
    facts: str,
    records: Sequence[Record],
    wrong: Sequence[str],
) -> None:
    """Print the table; write records, report and picture."""
    rows = table_rows(records)
    verdict = (
        "Requests and tokens agree exactly with the server's counters at every level."
        if records and not wrong
        else "\n".join(("COUNTS DISAGREE or runs failed:", *wrong))
    )
    print(f"\n{text_table(HEADER, rows)}\n\n{verdict}\n{facts}")
    if not records:
        return
    write_records(options.folder / "records.json", records)
    report = "\n\n".join(("# perf_analyzer", markdown_table(HEADER, rows), verdict, facts))
    (options.folder / "report.md").write_text(report + "\n", encoding="utf-8")
    if not options.no_plot:
        picture = options.folder / "sweep.png"
        command = [str(install.python()), "-m", "perf.analyzer.plots",
                   str(options.folder / "records.json"), str(picture), facts]  # fmt: skip
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            print(f"{BENCH}: no picture: the command above failed", file=sys.stderr)
    print(f"report, exports and picture: {options.folder}")


if __name__ == "__main__":
    raise SystemExit(main())
