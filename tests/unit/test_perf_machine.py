"""The busy check: what counts as foreign, when a run is refused, and when it is repeated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from perf.engines.base import BatchResult, EngineOptions, Prompts, RequestTimes
from perf.machine import (
    BusyMonitor,
    CpuSample,
    MachineBusyError,
    cpu_use,
    describe_machine,
    take_sample,
)
from perf.measure import Bench, latencies
from perf.workloads import Corpus, decode_workload, shared_prefix_workload


def _sampler(*samples: tuple[float, float, float]) -> Callable[[tuple[int, ...]], CpuSample]:
    """Hands out (wall, busy, own) in order."""
    iterator: Iterator[CpuSample] = iter([CpuSample(*sample) for sample in samples])
    return lambda _pids: next(iterator)


def test_foreign_time_is_what_the_machine_spent_beyond_our_own() -> None:
    use = cpu_use(CpuSample(10.0, 100.0, 50.0), CpuSample(12.0, 103.5, 53.0), cores=2)
    assert use.foreign_seconds == pytest.approx(0.5)
    assert use.foreign_share == pytest.approx(0.125)
    assert not use.quiet(0.05)
    assert use.quiet(0.12)


def test_own_work_alone_is_quiet_even_if_counted_a_tick_high() -> None:
    assert cpu_use(CpuSample(0, 0, 0), CpuSample(1.0, 2.0, 2.0), cores=2).quiet()
    assert cpu_use(CpuSample(0, 0, 0), CpuSample(1.0, 1.99, 2.02), cores=2).foreign_seconds == 0.0
    assert cpu_use(CpuSample(0, 0, 0), CpuSample(0.1, 0.22, 0.2), cores=2).quiet()


def test_require_quiet_names_share_limit_and_remedy() -> None:
    monitor = BusyMonitor(cores=2, sample=_sampler((0, 0, 0), (1, 1.0, 0.0)))
    with pytest.raises(MachineBusyError, match=r"50% .*limit 5%.*--allow-busy"):
        monitor.require_quiet(0.0)
    BusyMonitor(cores=2, sample=_sampler((0, 0, 0), (1, 0.05, 0.0))).require_quiet(0.0)


def test_a_failed_measurement_records_nothing() -> None:
    monitor = BusyMonitor(cores=2, sample=_sampler((0, 0, 0), (1, 0, 0)))
    with pytest.raises(ZeroDivisionError), monitor.measuring():
        1 / 0  # noqa: B018
    assert monitor.uses == []


def test_real_samples_tell_our_tree_from_other_processes() -> None:
    spin = "import time; e=time.process_time()\nwhile time.process_time()-e < 0.3: pass"
    before_own, before_other = take_sample((os.getpid(),)), take_sample((2**22 + 1,))
    subprocess.run([sys.executable, "-c", spin], check=True)
    after_own, after_other = take_sample((os.getpid(),)), take_sample((2**22 + 1,))
    assert after_own.own - before_own.own >= 0.28
    assert after_other.own == before_other.own == 0.0
    assert after_own.busy - before_own.busy >= 0.2


def test_machine_facts_are_filled_in() -> None:
    machine = describe_machine()
    assert machine.cores == os.cpu_count()
    assert machine.memory_bytes > 0
    assert str(machine.cores) in machine.summary()


class _Counting:
    """An engine that returns at once and keeps what it was asked for."""

    name = "counting"

    def __init__(self) -> None:
        self.seen: list[Prompts] = []

    def start(self, options: EngineOptions) -> dict[str, object]:
        raise NotImplementedError

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        self.seen.append(prompts)
        times = RequestTimes(tuple(range(max_new_tokens)), 2.0, 0.5)
        return BatchResult(tuple(times for _ in prompts), 2.0)

    def close(self) -> None:
        pass


def _bench(*foreign: float, retries: int = 2) -> Bench:
    """A bench whose measurements (one second each, two cores) see these foreign CPU seconds."""
    samples, busy = [], 0.0
    for wall, seconds in enumerate(foreign):
        samples += [(wall, busy, 0.0), (wall + 1, busy + seconds, 0.0)]
        busy += seconds
    monitor = BusyMonitor(cores=2, sample=_sampler(*samples))
    return Bench(Corpus(tuple(range(500))), 0, monitor, retries, settle=lambda _seconds: None)


def test_a_disturbed_measurement_is_repeated_with_fresh_prompts() -> None:
    bench, engine = _bench(1.0, 0.0), _Counting()
    (sampled,) = bench.sample(engine, decode_workload(2), 0)
    assert sampled.quiet
    assert len(engine.seen) == 2
    assert not set(engine.seen[0]) & set(engine.seen[1])
    bench.require_undisturbed()


def test_a_measurement_that_stays_disturbed_refuses_the_report() -> None:
    bench, engine = _bench(1.0, 1.0, 1.0), _Counting()
    bench.sample(engine, decode_workload(2), 5)
    assert len(engine.seen) == 3
    with pytest.raises(MachineBusyError, match="counting A2 round 5"):
        bench.require_undisturbed()


def test_cold_and_warm_are_repeated_together() -> None:
    bench, engine = _bench(0.0, 1.0, 0.0, 0.0), _Counting()
    cold, warm = bench.sample(engine, shared_prefix_workload(), 0)
    assert (cold.point.workload, warm.point.workload) == ("C cold", "C warm")
    assert len(engine.seen) == 4
    assert engine.seen[0][0][:1024] == engine.seen[1][0][:1024] != engine.seen[2][0][:1024]
    assert bench.disturbed == []


def test_decode_samples_have_latencies_behind_the_figure() -> None:
    (sampled,) = _bench(0.0).sample(_Counting(), decode_workload(4), 0)
    assert list(sampled.values) == [
        ("decode_tokens_per_second", "tokens/s"),
        ("ttft_seconds", "s"),
        ("inter_token_seconds", "s"),
    ]
    assert sampled.values["decode_tokens_per_second", "tokens/s"] == 4 * 128 / 2.0
    assert sampled.values["inter_token_seconds", "s"] == pytest.approx(1.5 / 127)


def test_no_latencies_from_an_engine_that_does_not_tell() -> None:
    assert latencies(BatchResult((RequestTimes((1, 2), 1.0),), 1.0)) == {}


def test_settling_comes_before_every_try() -> None:
    waits: list[float] = []
    bench = _bench(1.0, 0.0)
    bench.settle = waits.append
    bench.sample(_Counting(), decode_workload(1), 0)
    assert len(waits) == 2
