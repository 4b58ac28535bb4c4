"""Picks the lines of a Triton server log that a person needs when a start fails."""

from __future__ import annotations

import re
from pathlib import Path

_LOAD_FAILURE = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<text>.+)")
_SEVERE = re.compile(r"^[EF]\d{4} ")
_NOISE = re.compile(r"CudaDriverHelper|CUDA driver version")
"""Errors that every machine without a GPU logs."""
_STARVED = "boost::interprocess::lock_exception"
_MAX_LINES = 20


def read_log(path: Path | None, start: int) -> str:
    """The log from byte ``start``, or all of it if it was cut meanwhile; empty if there is none."""
    if path is None or not path.exists():
        return ""
    data = path.read_bytes()
    return data[start if start <= len(data) else 0 :].decode(errors="replace")


def load_failure(log: str) -> str | None:
    """The reason that a model gave for not loading, without Triton's decoration; None if none."""
    for line in log.splitlines():
        match = _LOAD_FAILURE.search(line)
        if match:
            return clean_message(match["text"])
    return None


def starved(log: str) -> bool:
    """Whether the server aborted because one of its processes got no processor time for too long:
    its locks between processes have a time limit, and it does not survive that."""
    return _STARVED in log


def clean_message(text: str) -> str:
    """Strip what Triton wraps around a Python exception's message: status, class, traceback."""
    text = text.strip().strip('"')
    text = text.replace("\\n", "\n")
    text = re.split(r"\n+At:\n", text)[0]
    text = re.sub(r"^(Internal|Invalid argument|Unavailable|Unknown|Not found): ", "", text)
    text = re.sub(r"^(Triton(Model|Error)\w*|\w+(Error|Exception)): ", "", text)
    return text.strip()


def failure_lines(log: str) -> str:
    """Errors of the log, else its last lines; at most ``_MAX_LINES``."""
    lines = [line for line in log.splitlines() if line.strip() and not _NOISE.search(line)]
    severe = [line for line in lines if _SEVERE.match(line)]
    return "\n".join((severe or lines)[-_MAX_LINES:])
