"""An engine without a model, for tests of the protocol: continues a prompt by counting up.

``extra`` may ask for misbehaviour: ``{"fail": "start" | "run" | "exit" | "short"}``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from perf.engines.base import BatchResult, EngineOptions, Prompts, RequestTimes
from perf.engines.worker import main


class DummyEngine:
    """See ``Engine``."""

    name = "dummy"

    def __init__(self) -> None:
        self._fail: object = None

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        self._fail = options.extra.get("fail")
        if self._fail == "start":
            raise ValueError("asked to fail")
        print("noise on standard output must not disturb the protocol")
        return {"version": "1", "threads": options.threads}

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        if self._fail == "run":
            raise ValueError("asked to fail")
        if self._fail == "exit":
            os._exit(3)
        started = time.perf_counter()
        count = max_new_tokens - (self._fail == "short")
        requests = tuple(
            RequestTimes(
                tuple(range(prompt[-1] + 1, prompt[-1] + 1 + count)),
                time.perf_counter() - started,
                0.0,
            )
            for prompt in prompts
        )
        return BatchResult(requests, time.perf_counter() - started)

    def close(self) -> None:
        pass


if __name__ == "__main__":
    main(DummyEngine)
