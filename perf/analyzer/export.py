"""Reads perf_analyzer's profile export: what each request sent, and what came back when.

The export holds every response of every request. Over gRPC a response is an object of output
tensors; of a tensor without elements perf_analyzer writes whatever memory it finds, so tokens are
counted by ``num_output_tokens``, which always has one, and never by ``token_ids``. Over HTTP a
response is a piece of the event stream as it was read: events are put together from the pieces, and
an event comes with the piece that completes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_DATA = "data:"
_FINISHED = ("stop", "length")


class ExportError(ValueError):
    """The export is not what perf_analyzer writes, or lacks what the figures need."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Tokens that came together. ``seconds`` since the request was sent."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class AnalyzedRequest:
    """One request of an export. ``began`` and ``ended`` in seconds of one clock per export."""

    began: float
    ended: float
    prompt_tokens: int
    deliveries: tuple[Delivery, ...]
    finish_reason: str
    """Empty: its last response did not come, or was an error."""

    @property
    def finished(self) -> bool:
        return self.finish_reason in _FINISHED

    @property
    def tokens(self) -> int:
        return sum(delivery.tokens for delivery in self.deliveries)

    @property
    def ttft(self) -> float | None:
        return self.deliveries[0].seconds if self.deliveries else None

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between deliveries: the inter-token latencies."""
        return tuple(b.seconds - a.seconds for a, b in pairwise(self.deliveries))

    @property
    def per_output_token(self) -> float | None:
        """Mean seconds per token after the first delivery's."""
        later = self.tokens - (self.deliveries[0].tokens if self.deliveries else 0)
        if later == 0:
            return None
        return (self.deliveries[-1].seconds - self.deliveries[0].seconds) / later


def read_export(path: Path) -> list[AnalyzedRequest]:
    """All requests of an export of one experiment, in the order in which they were sent.

    Raises:
        ExportError: names the file and what is wrong with it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        (experiment,) = document["experiments"]
        requests = experiment["requests"]
        # Whole nanoseconds since the epoch do not fit a float: count from the first one.
        origin = min((request["timestamp"] for request in requests), default=0)
        found = [_request(request, origin) for request in requests]
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{path.name}: {type(error).__name__}: {error}") from error
    return sorted(found, key=lambda request: request.began)


def _request(entry: Mapping[str, Any], origin: int) -> AnalyzedRequest:
    began, times = entry["timestamp"], entry["response_timestamps"]
    outputs = entry["response_outputs"]
    if len(times) != len(outputs):
        raise ExportError(f"{len(times)} timestamps for {len(outputs)} responses")
    deliveries: list[Delivery] = []
    counted = prompt_tokens = 0
    reason, ended = "", began
    for time, output in _outputs(times, outputs):
        ended = time
        if "num_output_tokens" not in output:
            reason = ""  # an error message
            continue
        # Of what came together, the last count says it all.
        new = int(output["num_output_tokens"]) - counted
        if new < 0:
            raise ExportError("num_output_tokens decreases: the parser is for n = 1")
        if new:
            deliveries.append(Delivery((time - began) / 1e9, new))
        counted += new
        prompt_tokens = int(output["num_input_tokens"])
        reason = str(output["finish_reason"])
    return AnalyzedRequest(
        (began - origin) / 1e9, (ended - origin) / 1e9, prompt_tokens, tuple(deliveries), reason
    )


def _outputs(
    times: Sequence[int], outputs: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Time and content of each response: tensors as they are, events out of an event stream."""
    pending = ""
    for time, output in zip(times, outputs, strict=True):
        if "response" not in output:
            if output:  # the empty one that only closes a stream tells nothing
                yield time, output
            continue
        pending += output["response"]
        *complete, pending = pending.split("\n\n")
        for event in complete:
            yield time, json.loads(event.strip().removeprefix(_DATA))
    if pending.strip():
        raise ExportError(f"an event without its end: {pending[:80]!r}")
