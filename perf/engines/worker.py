"""The worker's side of the protocol between the benchmark and an engine in its own process.

JSON objects, one a line: requests on standard input, answers on the original standard output.
Engines print to standard output as they please, so that descriptor is pointed at standard error
(the log) before the engine is imported.

    {"op": "start", "options": {...}}                       -> {"ok": true, "info": {...}}
    {"op": "run", "prompts": [[...]], "max_new_tokens": n}  -> {"ok": true, "wall_seconds": s,
        "requests": [{"token_ids": [...], "finished_seconds": s, "first_token_seconds": s}],
        "cpu_seconds": {"process": s}, "step_seconds": {"part": [s]}}
    {"op": "memory"}                                        -> {"ok": true, "resident_bytes": n}
    {"op": "close"}                                         -> {"ok": true}, then the process ends

A failed operation answers ``{"ok": false, "error": "..."}`` and the worker goes on.  Standard
library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from perf.engines.base import BatchResult, EngineOptions, RequestTimes

if TYPE_CHECKING:
    from perf.engines.base import Engine

Message = dict[str, object]
_PR_SET_PDEATHSIG = 1
"""Linux: the signal that this process gets when its parent ends."""


def encode_result(result: BatchResult) -> Message:
    """The answer to ``run``."""
    return {
        "ok": True,
        "wall_seconds": result.wall_seconds,
        "requests": [asdict(request) for request in result.requests],
        "cpu_seconds": dict(result.cpu_seconds),
        "step_seconds": dict(result.step_seconds),
    }


def decode_result(message: Message) -> BatchResult:
    """The inverse of ``encode_result``.

    Raises:
        KeyError, TypeError: not such an answer.
    """
    requests = tuple(
        RequestTimes(
            tuple(entry["token_ids"]), entry["finished_seconds"], entry["first_token_seconds"]
        )
        for entry in message["requests"]  # type: ignore[attr-defined]
    )
    steps = {part: tuple(values) for part, values in message["step_seconds"].items()}  # type: ignore[attr-defined]
    wall, cpu = message["wall_seconds"], message["cpu_seconds"]
    return BatchResult(requests, float(wall), cpu, steps)  # type: ignore[arg-type]


def resident_bytes() -> int:
    """Resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def serve(engine: Engine, requests: TextIO, answers: TextIO) -> None:
    """Answer until ``close`` or the end of ``requests``."""
    try:
        for line in requests:
            message = json.loads(line)
            try:
                answer = _answer(engine, message)
            except Exception as error:  # noqa: BLE001  (reported to the benchmark, which decides)
                traceback.print_exc(file=sys.stderr)
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            if message["op"] == "close":
                break
    finally:
        engine.close()


def _answer(engine: Engine, message: Message) -> Message:
    match message["op"]:
        case "start":
            options = EngineOptions(**message["options"])  # type: ignore[arg-type]
            return {"ok": True, "info": dict(engine.start(options))}
        case "run":
            result = engine.run(message["prompts"], message["max_new_tokens"])  # type: ignore[arg-type]
            return encode_result(result)
        case "memory":
            return {"ok": True, "resident_bytes": resident_bytes()}
        case "close":
            engine.close()
            return {"ok": True}
        case unknown:
            raise ValueError(f"unknown operation {unknown!r}")


def main(make_engine: Callable[[], Engine]) -> None:
    """Entry of a worker module: take over standard output, build the engine, serve."""
    # A paused worker whose benchmark was killed would stay stopped for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(make_engine(), sys.stdin, answers)
    # Interpreter teardown of native engines can hang or crash; everything is closed by now.
    answers.flush()
    os._exit(0)
