"""One request of a trace, and the JSON-lines file that holds a trace.

A line is an object with these keys (only the first three are needed)::

    {"arrival_seconds": 0.25, "prompt_tokens": 180, "output_tokens": 200,
     "kind": "chat", "priority": 0, "prefix": "system-3", "prefix_tokens": 256,
     "session": "s17", "think_seconds": 8.0}

Only lengths count: the replay makes up token ids, equal where a prefix or a session is shared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

MAX_PREFIX_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What a client sends. Times are seconds, lengths tokens.

    Raises:
        ValueError: a length, time or name out of range.
    """

    arrival_seconds: float
    """Since the start of the trace. A later turn of a session arrives no earlier than this, and no
    earlier than ``think_seconds`` after the answer to the turn before."""
    prompt_tokens: int
    """Tokens of its own: behind the shared prefix, and behind the session so far."""
    output_tokens: int
    kind: str = ""
    """A label: results are reported per kind, too."""
    priority: int = 0
    prefix: str = ""
    """Requests that name the same prefix begin with the same tokens."""
    prefix_tokens: int = 0
    session: str = ""
    """Requests of one session are its turns, in the order of the trace: each prompt begins with
    the prompt and the output of the turn before (its own ``prefix`` counts in the first only)."""
    think_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("arrival_seconds", "think_seconds"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name}: got {value!r}; must be a number of at least 0")
        for name, low in (("prompt_tokens", 1), ("output_tokens", 1), ("prefix_tokens", 0)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value:
                raise ValueError(f"{name}: got {value!r}; must be an integer of at least {low}")
        if type(self.priority) is not int:
            raise ValueError(f"priority: got {self.priority!r}; must be an integer")
        if self.prefix_tokens > MAX_PREFIX_TOKENS:
            raise ValueError(
                f"prefix_tokens: got {self.prefix_tokens}; at most {MAX_PREFIX_TOKENS}"
            )
        for name in ("kind", "prefix", "session"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}: got {getattr(self, name)!r}; must be a string")
        if bool(self.prefix) != bool(self.prefix_tokens):
            raise ValueError("prefix and prefix_tokens: give both or neither")


_NAMES = frozenset(field.name for field in fields(TraceRequest))
_DEFAULTS = {
    field.name: field.default
    for field in fields(TraceRequest)
    if field.name not in ("arrival_seconds", "prompt_tokens", "output_tokens")
}


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a JSON-lines trace; empty lines are skipped.

    Raises:
        ValueError: names the line and what is wrong with it.
    """
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError("must be a JSON object")
                unknown = sorted(set(entry) - _NAMES)
                if unknown:
                    raise ValueError(f"unknown keys: {', '.join(unknown)}")
                requests.append(TraceRequest(**entry))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path.name} line {number}: {error}") from None
    return requests


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write what ``read_trace`` reads; keys at their defaults are left out."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            entry = {
                name: value
                for name, value in asdict(request).items()
                if name not in _DEFAULTS or value != _DEFAULTS[name]
            }
            file.write(json.dumps(entry) + "\n")


def deal(requests: Iterable[TraceRequest], servers: int) -> list[list[TraceRequest]]:
    """Deal a trace to independent servers in turn; a session stays on one server."""
    shares: list[list[TraceRequest]] = [[] for _ in range(servers)]
    homes: dict[str, int] = {}
    turn = 0
    for request in requests:
        home = homes.get(request.session) if request.session else None
        if home is None:
            home, turn = turn, (turn + 1) % servers
            if request.session:
                homes[request.session] = home
        shares[home].append(request)
    return shares
