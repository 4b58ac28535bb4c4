"""Affinity, circuit breaker, fair queue and rate limit: the pure parts, driven by Hypothesis."""

from __future__ import annotations

import copy
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pocket_client.gateway import affinity
from pocket_client.gateway.breaker import (
    FAILURES,
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    CircuitBreaker,
)
from pocket_client.gateway.errors import ApiError
from pocket_client.gateway.fair_queue import FairQueue
from pocket_client.gateway.rate_limit import RateLimiter, TokenBucket, duration
from pocket_client.options import chat_request, text_request

SERVERS = [f"10.0.0.{i}:8001" for i in range(8)]
servers = st.lists(st.sampled_from(SERVERS), min_size=1, unique=True)
keys = st.binary(min_size=16, max_size=16)


# --- affinity -------------------------------------------------------------------------------------


@given(keys, servers, st.data())
def test_the_choice_does_not_depend_on_order_and_survives_losses(
    key: bytes, names: list[str], data: st.DataObject
) -> None:
    idle = dict.fromkeys(names, 0)
    best = affinity.choose(key, idle)
    assert affinity.choose(key, dict.fromkeys(data.draw(st.permutations(names)), 0)) == best
    others = [name for name in names if name != best]
    if others:  # losing a server that was not chosen changes nothing
        lost = data.draw(st.sampled_from(others))
        left = dict.fromkeys((name for name in names if name != lost), 0)
        assert affinity.choose(key, left) == best


@given(keys, servers, st.sets(st.sampled_from(SERVERS)), st.data())
def test_known_servers_come_first_within_the_limit(
    key: bytes, names: list[str], known: set[str], data: st.DataObject
) -> None:
    loads = {name: data.draw(st.integers(0, 50)) for name in names}
    chosen = affinity.choose(key, loads, known)
    limit = affinity.load_limit(loads.values(), affinity.KNOWN_SLACK)
    open_to_it = {name: loads[name] for name in names if name in known and loads[name] <= limit}
    if open_to_it:
        assert chosen in open_to_it
        assert loads[chosen] == min(open_to_it.values())
    else:
        assert chosen not in known or loads[chosen] <= limit
        assert loads[chosen] <= affinity.load_limit(loads.values(), affinity.NEW_SLACK)


@given(st.lists(st.sampled_from([bytes([i]) for i in range(4)]), max_size=200), servers)
def test_popular_prefixes_spread_when_they_must(arrivals: list[bytes], names: list[str]) -> None:
    """Nothing finishes: whatever the keys, no server runs away, and what spilled stays known."""
    loads, routes = dict.fromkeys(names, 0), affinity.PrefixRoutes()
    given_to: dict[bytes, set[str]] = {}
    for key in arrivals:
        limit = affinity.load_limit(loads.values(), affinity.KNOWN_SLACK)
        chosen = routes.choose(key, loads)
        assert loads[chosen] <= limit
        known = given_to.setdefault(key, set())
        if chosen not in known:  # only since all that have it are full
            assert all(loads[name] > limit for name in known)
            known.add(chosen)
        loads[chosen] += 1


def test_a_spilled_prefix_has_two_servers_until_one_leaves() -> None:
    routes, key = affinity.PrefixRoutes(), b"popular"
    idle = dict.fromkeys(SERVERS[:3], 0)
    routes.meet(idle)
    first = routes.choose(key, idle)
    busy = {**idle, first: affinity.KNOWN_SLACK + 1}
    second = routes.choose(key, busy)
    third = next(name for name in idle if name not in (first, second))
    assert second != first
    routes.meet(idle)
    assert routes.choose(key, {**busy, second: 1}) == second  # not the idle third
    assert routes.choose(key, {first: 1, second: 2, third: 0}) == first
    routes.meet([second, third])
    assert routes.choose(key, {second: 1, third: 0}) == second


def test_a_server_that_comes_back_gets_its_prefixes_again() -> None:
    routes, names = affinity.PrefixRoutes(), SERVERS[:2]
    keys = [bytes([number]) for number in range(20)]

    def where(servers: list[str]) -> list[str]:
        routes.meet(servers)
        return [routes.choose(key, dict.fromkeys(servers, 0)) for key in keys]

    before = where(names)
    assert set(before) == set(names)
    assert set(where(names[:1])) == {names[0]}
    assert where(names) == before


def test_few_prefixes_are_remembered() -> None:
    routes, loads = affinity.PrefixRoutes(capacity=2), dict.fromkeys(SERVERS[:4], 0)
    home = {key: routes.choose(key, loads) for key in (b"a", b"b")}
    elsewhere = {**loads, home[b"a"]: 3}
    assert routes.choose(b"a", elsewhere) == home[b"a"]
    routes.choose(b"c", loads)  # b is the one that was asked for longest ago
    assert len(routes) == 2
    assert routes.choose(b"a", elsewhere) == home[b"a"]
    assert routes.choose(b"b", {**loads, home[b"b"]: 3}) != home[b"b"]


def test_keys_spread_evenly_and_few_move() -> None:
    def choices(names: list[str]) -> list[str]:
        idle = dict.fromkeys(names, 0)
        return [affinity.choose(i.to_bytes(16, "big"), idle) for i in range(4000)]

    before, after = choices(SERVERS[:4]), choices(SERVERS[:5])
    assert all(800 < count < 1200 for count in Counter(before).values())
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {SERVERS[4]}
    assert 600 < len(moved) < 1000


def test_turns_of_a_conversation_agree_and_tenants_do_not() -> None:
    system = {"role": "system", "content": "You answer questions about rivers. " * 8}
    turns = [system, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]

    def key(messages: list[dict[str, str]], salt: str = "a") -> bytes:
        return affinity.prefix_key(chat_request(messages, {"cache_salt": salt}, stream=True))

    assert key(turns[:2]) == key(turns) == key([system, {"role": "user", "content": "Other"}])
    assert key(turns) != key(turns, salt="b")
    short = [[{"role": "user", "content": text}] for text in ("one", "two")]
    assert key(short[0]) != key(short[1])
    ids = [affinity.prefix_key(text_request([*range(64), i], {}, stream=True)) for i in range(2)]
    assert ids[0] == ids[1]
    assert affinity.prefix_key(text_request("a\ud800", {}, stream=True))


# --- circuit breaker ------------------------------------------------------------------------------


def test_breaker_opens_pauses_tries_and_closes() -> None:
    breaker = CircuitBreaker()
    for _ in range(FAILURES):
        assert breaker.allows(0.0)
        breaker.failed(0.0)
    assert not breaker.allows(0.0)
    assert breaker.allows(FIRST_PAUSE_SECONDS)
    breaker.sent(FIRST_PAUSE_SECONDS)
    assert not breaker.allows(FIRST_PAUSE_SECONDS)  # one trial at a time
    breaker.failed(FIRST_PAUSE_SECONDS)
    assert not breaker.allows(FIRST_PAUSE_SECONDS + 1.5)  # the pause has doubled
    assert breaker.allows(3 * FIRST_PAUSE_SECONDS)
    breaker.sent(3.0)
    breaker.gave_up()
    assert breaker.allows(3.0)  # a trial whose client left says nothing
    breaker.sent(3.0)
    breaker.succeeded()
    assert breaker.closed
    assert breaker.allows(3.0)


@given(st.lists(st.tuples(st.sampled_from("sfg"), st.floats(0, 40)), max_size=60))
def test_breaker_never_pauses_longer_than_the_longest(steps: list[tuple[str, float]]) -> None:
    breaker, now, in_a_row = CircuitBreaker(), 0.0, 0
    for what, passed in steps:
        now += passed
        if not breaker.allows(now):
            assert in_a_row >= FAILURES
            assert breaker.allows(now + LONGEST_PAUSE_SECONDS)
            continue
        breaker.sent(now)
        match what:
            case "s":
                breaker.succeeded()
                in_a_row = 0
                assert breaker.closed
            case "f":
                breaker.failed(now)
                in_a_row += 1
            case "g":
                breaker.gave_up()
        assert breaker.closed == (in_a_row < FAILURES)


# --- fair queue -----------------------------------------------------------------------------------

TENANTS = ("a", "b", "c")


class FairQueueMachine(RuleBasedStateMachine):
    """Against a plain model: who waits in which order, who runs."""

    def __init__(self) -> None:
        super().__init__()
        self.places = 3
        self.queue: FairQueue[int] = FairQueue(self.places)
        self.waiting: dict[str, deque[int]] = {name: deque() for name in TENANTS}
        self.running: Counter[str] = Counter()
        self.next = 0
        self.owner: dict[int, str] = {}
        self.passed_over: Counter[str] = Counter()

    @rule(tenant=st.sampled_from(TENANTS))
    def add(self, tenant: str) -> None:
        self.next += 1
        self.owner[self.next] = tenant
        self.queue.add(tenant, self.next)
        self.waiting[tenant].append(self.next)
        self.start()

    def start(self) -> None:
        while (item := self.queue.start()) is not None:
            tenant = self.owner[item]
            assert self.waiting[tenant].popleft() == item  # in order within a tenant
            candidates = [name for name in TENANTS if self.waiting[name] or name == tenant]
            assert self.running[tenant] == min(self.running[name] for name in candidates)
            self.running[tenant] += 1
            for name in TENANTS:
                waits = bool(self.waiting[name]) and name != tenant and not self.running[name]
                self.passed_over[name] = self.passed_over[name] + 1 if waits else 0

    @precondition(lambda self: self.running.total() > 0)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(sorted(+self.running)))
        self.running[tenant] -= 1
        self.queue.finish(tenant)
        self.start()

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from([i for items in self.waiting.values() for i in items]))
        tenant = self.owner[item]
        assert self.queue.withdraw(tenant, item)
        assert not self.queue.withdraw(tenant, item)
        self.waiting[tenant].remove(item)

    @invariant()
    def counts_agree(self) -> None:
        assert self.queue.running == self.running.total() <= self.places
        assert self.queue.waiting == sum(map(len, self.waiting.values()))
        for name in TENANTS:
            assert self.queue.waiting_of(name) == len(self.waiting[name])

    @invariant()
    def no_place_is_free_while_somebody_waits(self) -> None:
        assert self.queue.running == self.places or self.queue.waiting == 0

    @invariant()
    def nobody_starves(self) -> None:
        """A tenant with nothing running lets every other one go first at most once."""
        assert all(count < len(TENANTS) for count in self.passed_over.values())


FairQueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_fair_queue = FairQueueMachine.TestCase


def test_a_flood_does_not_delay_another_tenant() -> None:
    queue: FairQueue[str] = FairQueue(2)
    for i in range(100):
        queue.add("flood", f"flood{i}")
    assert [queue.start(), queue.start()] == ["flood0", "flood1"]
    queue.add("other", "other0")
    queue.finish("flood")
    assert queue.start() == "other0"


# --- rate limit -----------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 5), max_size=80), st.floats(0.1, 20), st.integers(1, 10))
def test_bucket_never_lets_more_pass_than_it_may(
    gaps: list[float], rate: float, burst: int
) -> None:
    bucket, now = TokenBucket(rate, burst), 100.0
    passed: list[float] = []
    for gap in gaps:
        now += gap
        wait = bucket.take(now)
        if wait == 0:
            passed.append(now)
        else:
            assert copy.copy(bucket).take(now + wait + 1e-6) == 0
        for i, first in enumerate(passed):
            assert len(passed) - i <= burst + (now - first) * rate + 1e-6


def test_limiter_says_when_to_come_back() -> None:
    now = 0.0
    limiter = RateLimiter(60, clock=lambda: now)
    for _ in range(10):
        limiter.admit("a", 0)
    with pytest.raises(ApiError) as refused:
        limiter.admit("a", 0)
    assert refused.value.status == 429
    assert refused.value.headers == {"retry-after": "1"}
    assert refused.value.message == (
        "requests per minute: limit 60, 0 left, 1 needed; there is room in 1s"
    )
    limiter.admit("b", 0)  # has a bucket of its own
    now = 1.0
    limiter.admit("a", 0)
    RateLimiter(None).admit("a", 10**9)
    assert RateLimiter(None).headers("a") == {}


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(0, 300), st.integers(0, 300), st.booleans()),
        max_size=60,
    ),
    st.integers(1, 1000),
)
def test_over_time_nobody_uses_more_tokens_than_the_rate(
    requests: list[tuple[float, int, int, bool]], limit: int
) -> None:
    """Expected and used tokens differ at will, and some requests never settle."""
    now, used_in_all, largest = 0.0, 0.0, 0
    limiter = RateLimiter(None, limit, clock=lambda: now)
    for gap, expected, used, settles in requests:
        now += gap
        try:
            grant = limiter.admit("a", expected)
        except ApiError as refused:
            now += int(refused.headers["retry-after"])
            grant = limiter.admit("a", expected)  # what it says is enough
        if settles:
            grant.settle(used)
            grant.settle(10**6)  # only the first counts
        used_in_all += used if settles else min(expected, limit)
        largest = max(largest, used if settles else 0)
        # A minute's worth at once, the rate from then on, and the last request's own surprise.
        assert used_in_all <= limit + now * limit / 60 + largest + 1e-6


def test_what_was_not_used_is_there_again_and_what_was_is_owed() -> None:
    now = 0.0
    limiter = RateLimiter(None, 600, clock=lambda: now)
    limiter.admit("a", 500).settle(100)
    assert limiter.headers("a") == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "10s",
    }
    limiter.admit("a", 500).settle(1100)
    assert limiter.headers("a")["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(ApiError, match=r"limit 600, 0 left, 1 needed; there is room in 1m1s"):
        limiter.admit("a", 1)
    limiter.admit("b", 600)
    now = 61.0
    limiter.admit("a", 1)


def test_more_than_a_minutes_worth_needs_all_of_it() -> None:
    now = 0.0
    limiter = RateLimiter(2, 60, clock=lambda: now)
    limiter.admit("a", 10**9).settle(120)
    for seconds in (60, 119):
        now = float(seconds)
        with pytest.raises(ApiError, match="60 needed"):
            limiter.admit("a", 61)
    now = 120.0
    limiter.admit("a", 61)  # the refused ones took no request either


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0004, "1ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (59.2, "1m0s"),
        (360, "6m0s"),
        (3630, "1h0m30s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
