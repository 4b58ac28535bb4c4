"""What chaos does to a server, one thing at a time, and how long it takes until all is well."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from perf.load.ledger import Fault, Ledger
from perf.load.mix import Mix, MixedLoad
from pocket_backend.triton.liveness import SERVER
from tests.support.served import Served, slowness

STUBS = ("tokenizer", "generator", "detokenizer")
_SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
HEAL_SECONDS = 90.0
"""Least limit of waiting; the bars are judged by the report."""
_HEAL_STRETCH = 10.0
"""The limit in seconds for each unit of ``slowness``, by which the report stretches its bars."""
RECONNECT_SECONDS = 6.0
"""A gRPC channel whose server was gone tries again after at most 5 s (the client's setting)."""
_PRESSURE_SECONDS = 3.0
_OVERLOADED = frozenset({"OverloadedError"})


@dataclass(frozen=True, slots=True)
class Blow:
    """One kind of fault: a signal to a process, or clients that are too many."""

    name: str
    signal: signal.Signals | None = None
    victim: str = ""
    mix: Mix | None = None
    users: int = 0


def blows() -> list[Blow]:
    """Each once: both signals to each of the four processes, a flood, and mass disconnection."""
    return [
        *(
            Blow(f"{name} {victim}", signal=number, victim=victim)
            for name, number in _SIGNALS.items()
            for victim in (*STUBS, SERVER)
        ),
        Blow("flood", mix=Mix({"grpc": 2, "http": 1}, max_tokens=16), users=64),
        Blow("disconnects", mix=Mix({"leave": 1}), users=32),
    ]


def schedule(draw: random.Random) -> Iterator[Blow]:
    """All blows in random order, again and again."""
    deck = blows()
    while True:
        draw.shuffle(deck)
        yield from deck


@dataclass(slots=True)
class Healing:
    """What the supervisor did about a signal: seconds, or None if it did not."""

    blow: str
    noticed: float | None = None
    """From the signal to `server unhealthy`."""
    restored: float | None = None
    """From there to `service restored`, as the supervisor says."""


class Assailant:
    """Strikes one server that is under load, and remembers what was done to it.

    ``zero``: ``time.monotonic`` when that load began; all times count from there.  Loads of its own
    (floods) are entered into ``ledger`` when they have ended.
    """

    def __init__(
        self,
        served: Served,
        zero: float,
        ledger: Ledger,
        make_load: Callable[[Mix, int], MixedLoad],
    ) -> None:
        self.faults: list[Fault] = []
        self.healings: list[Healing] = []
        self._served = served
        self._zero = zero
        self._ledger = ledger
        self._make_load = make_load

    def strike(self, blow: Blow) -> None:
        """Returns when the server is well again, and its clients had time to reconnect.

        Raises:
            AssertionError: the server was not restored in time, or its command ended.
        """
        began = self._now()
        ended = math.inf
        try:
            if blow.mix is not None:
                self._press(blow.mix, blow.users)
                ended = self._now()
            else:
                self._send(blow)
                ended = self._now() + RECONNECT_SECONDS
        finally:
            excuses = _OVERLOADED if blow.mix is not None else None
            self.faults.append(Fault(blow.name, began, ended, excuses))
        time.sleep(max(0.0, ended - self._now()))

    def _send(self, blow: Blow) -> None:
        served = self._served
        unhealthy, restored = (
            served.text.count(line) for line in ("server unhealthy", "service restored")
        )
        healing = Healing(blow.name)
        self.healings.append(healing)
        pid = served.pids()[blow.victim]
        struck = self._now()
        assert blow.signal is not None
        os.kill(pid, blow.signal)
        limit = max(HEAL_SECONDS, _HEAL_STRETCH * slowness())
        served.wait_for_line("server unhealthy", limit, unhealthy + 1)
        healing.noticed = self._now() - struck
        served.wait_for_line("service restored", limit, restored + 1)
        healing.restored = served.seconds_restored()

    def _press(self, mix: Mix, users: int) -> None:
        load = self._make_load(mix, users)
        load.start()
        time.sleep(_PRESSURE_SECONDS)
        outcomes = load.stop(HEAL_SECONDS)
        offset = load.started - self._zero
        self._ledger.add(load.sent(), [replace(o, at=o.at + offset) for o in outcomes])

    def _now(self) -> float:
        return time.monotonic() - self._zero
