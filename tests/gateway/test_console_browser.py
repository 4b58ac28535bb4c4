"""The web console in Chromium: send, stream, stop, errors, reconnecting, phones, attacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from chromium import MISSING, chromium
from fake_upstream import WORDS, FakeUpstream, Received, Step, failing, two_then_wait, wait_first
from gateway_server import RunningGateway

from pocket_client.gateway.auth import ApiKeys, entry_of
from pocket_client.gateway.settings import GatewaySettings

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
WAIT_MS = 60_000
TEXT = "".join(WORDS)
PHONE = {"width": 360, "height": 640}
STATS = {
    "running": 3,
    "waiting": 1,
    "slots_total": 8,
    "blocks_total": 2000,
    "blocks_used": 1,
    "blocks_cached": 999,
    "blocks_free": 1000,
    "prefix_query_tokens": 400,
    "prefix_hit_tokens": 100,
}


@dataclass
class Tab:
    """A page of the console, and all that went wrong in it."""

    page: Any
    url: str
    errors: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)

    def send(self, text: str = "Hello") -> None:
        self.page.fill("#prompt", text)
        self.page.keyboard.press("Enter")

    def answer(self) -> Any:
        return self.page.locator(".message.assistant").last

    def wait_for_text(self, text: str) -> None:
        self.page.locator(".message.assistant .text", has_text=text).last.wait_for()

    def wait_for_end(self) -> None:
        self.page.locator("#send").wait_for()

    def wait_for_state(self, state: str) -> None:
        self.page.locator(f'#status[data-state="{state}"]').wait_for(state="attached")

    def overflow(self) -> int:
        """Pixels by which the page is wider than the screen."""
        width: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return width


OpenTab = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def open_tab(browser: Any, gateway: RunningGateway) -> Iterator[OpenTab]:
    contexts = []

    def make(at: RunningGateway = gateway, **options: Any) -> Tab:
        context = browser.new_context(**options)
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        tab = Tab(context.new_page(), at.url)
        tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.page.on("request", lambda request: tab.requested.append(request.url))
        tab.page.goto(at.url)
        return tab

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def tab(open_tab: OpenTab) -> Iterator[Tab]:
    """Ready; after the test nothing has thrown, and nothing was asked of anybody else."""
    one = open_tab()
    one.wait_for_state("online")
    yield one
    assert one.errors == []
    assert [url for url in one.requested if not url.startswith(one.url)] == []


def saying(text: str) -> Callable[[Received], Iterator[Step]]:
    return lambda _received: iter([("chunk", (text, (1,), "stop"))])


def test_a_conversation_streams_and_is_continued(tab: Tab, upstream: FakeUpstream) -> None:
    tab.page.fill('[name="system"]', "Be brief.")
    tab.page.fill('[name="temperature"]', "0.5")
    tab.page.fill('[name="max_tokens"]', "5")
    upstream.script = two_then_wait
    tab.send("First")
    tab.wait_for_text("one two")
    assert tab.page.locator("#stop").is_visible()  # it shows while the answer is not over
    upstream.release()
    tab.wait_for_text("one two end")
    tab.wait_for_end()
    figures = tab.answer().locator(".figures").inner_text()
    assert re.search(r"^3 tokens · [\d.]+ per second · first after .* · prompt \d+", figures)
    upstream.script = saying("Second answer")
    tab.send("Second")
    tab.wait_for_text("Second answer")
    tab.wait_for_end()
    last = upstream.received[-1]
    assert re.findall(r"Be brief\.|First|one two end|Second", last.inputs["messages"]) == [
        "Be brief.",
        "First",
        "one two end",
        "Second",
    ]
    assert (last.parameters["temperature"], last.parameters["max_tokens"]) == (0.5, 5)
    # The tab remembers, another one does not.
    tab.page.reload()
    assert tab.page.locator(".message").count() == 4
    tab.page.click("#new-button")
    assert tab.page.locator("#welcome").is_visible()


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping_cancels_upstream_and_keeps_the_text(
    tab: Tab, upstream: FakeUpstream, how: str
) -> None:
    upstream.script = two_then_wait
    tab.send()
    tab.wait_for_text("one two")
    if how == "button":
        tab.page.click("#stop")
    else:
        tab.page.keyboard.press("Escape")
    tab.wait_for_end()
    upstream.wait_for(lambda: bool(upstream.cancelled_ids), "cancelled upstream")
    assert tab.answer().locator(".text").inner_text().strip() == "one two"
    assert "stopped" in tab.answer().locator(".figures").inner_text()


def test_stopping_before_the_first_token(tab: Tab, upstream: FakeUpstream) -> None:
    upstream.script = wait_first
    tab.send()
    # The readiness check may be there as well.
    upstream.wait_for(lambda: any(one.stream for one in upstream.received), "asked")
    tab.page.click("#stop")
    tab.wait_for_end()
    upstream.wait_for(lambda: bool(upstream.cancelled_ids), "cancelled upstream")


def test_errors_are_shown_with_a_remedy_and_can_be_tried_again(
    tab: Tab, upstream: FakeUpstream
) -> None:
    upstream.script = failing(("error", "8 requests are waiting; retry later"))
    tab.send()
    error = tab.answer().get_by_role("alert")
    error.wait_for()
    assert "8 requests are waiting" in error.inner_text()
    assert "Try again in a few seconds" in error.inner_text()
    upstream.script = failing(("chunk", ("half", (1,), "")), ("error", "computing failed: boom"))
    tab.answer().get_by_text("Try again", exact=True).click()
    tab.wait_for_text("half")
    tab.answer().get_by_role("alert").get_by_text("boom").wait_for()
    upstream.script = saying("whole")
    tab.answer().get_by_text("Try again", exact=True).click()
    tab.wait_for_text("whole")
    assert tab.page.locator(".message").count() == 2
    assert tab.page.get_by_role("alert").count() == 0


def test_settings_out_of_range_are_not_sent(tab: Tab, upstream: FakeUpstream) -> None:
    asked = len(upstream.received)
    tab.page.fill('[name="temperature"]', "9")
    tab.send()
    assert tab.page.evaluate("document.activeElement.name") == "temperature"
    assert tab.page.input_value("#prompt") == "Hello"
    assert len(upstream.received) == asked


def test_it_reconnects_to_a_restarted_gateway(open_tab: OpenTab, upstream: FakeUpstream) -> None:
    settings = GatewaySettings(upstream=upstream.address)
    with RunningGateway(settings) as first:
        tab = open_tab(first)
        tab.wait_for_state("online")
        upstream.script = two_then_wait
        tab.send()
        tab.wait_for_text("one two")
    tab.wait_for_state("offline")
    assert tab.page.locator("#banner").is_visible()
    assert tab.answer().locator(".text").inner_text().strip() == "one two"
    upstream.script = saying("back again")
    with RunningGateway(settings, first.port):
        tab.wait_for_state("online")
        assert not tab.page.locator("#banner").is_visible()
        tab.answer().get_by_text("Try again", exact=True).click()
        tab.wait_for_text("back again")
        tab.wait_for_end()
        assert tab.errors == []


def test_a_key_is_asked_for_and_kept_in_the_tab_only(
    open_tab: OpenTab, upstream: FakeUpstream
) -> None:
    keys = ApiKeys.parse([entry_of("a", "pk-right")])
    with RunningGateway(GatewaySettings(upstream=upstream.address, api_keys=keys)) as gateway:
        tab = open_tab(gateway)
        tab.page.locator("#key-dialog[open]").wait_for()
        tab.page.fill("#key-input", "pk-right")
        tab.page.keyboard.press("Enter")
        tab.page.locator("#key-dialog[open]").wait_for(state="detached")
        tab.send()
        tab.wait_for_text(TEXT)
        tab.wait_for_end()
        stored = tab.page.evaluate("[JSON.stringify(localStorage), document.cookie]")
        assert "pk-right" not in "".join(stored)
        assert "pk-right" not in tab.page.content()
        assert not any("pk-right" in url for url in tab.requested)


ATTACKS = """<script>window.pwned = 1</script>
<img src=x onerror="window.pwned = 2">
<svg onload="window.pwned = 3"><a xlink:href="javascript:window.pwned=4">x</a></svg>
[click](javascript:window.pwned=5) [data](data:text/html,<script>window.pwned=6</script>)
![pixel](https://tracker.example/pixel.png) <iframe src="https://tracker.example"></iframe>
<form action="https://tracker.example"><input name="a"><button>Send</button></form>
[named](https://ok.example "title" onmouseover=window.pwned=7)
<a id="messages" name="send">clobber</a>
<style>body { display: none }</style> <math><mtext><mglyph><style><img src onerror=window.pwned=8>
`<img src=x onerror=window.pwned=9>` <https://ok.example/&quot;onclick=window.pwned=10>

```html"onmouseover="window.pwned=11
<script>window.pwned = 12</script>
```
"""


def test_what_a_model_writes_neither_runs_nor_loads_anything(
    tab: Tab, upstream: FakeUpstream
) -> None:
    tab.page.on("dialog", lambda dialog: tab.errors.append(f"dialog: {dialog.message}"))
    upstream.script = saying(ATTACKS)
    tab.send("<img src=x onerror='window.pwned = 13'>")
    tab.wait_for_text("clobber")
    tab.wait_for_end()
    for link in tab.answer().locator("a").all():
        assert re.match(r"https://", link.get_attribute("href") or "")
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert (
        tab.page.locator("#messages")
        .locator("script, img, svg, iframe, form, style, input")
        .count()
        == 0
    )
    attributes = tab.page.evaluate(
        "[...document.querySelectorAll('.assistant .text *')].flatMap(e => e.getAttributeNames())"
    )
    assert set(attributes) <= {"href", "title", "target", "rel", "class", "type"}
    assert tab.page.locator(".message.user img").count() == 0
    tab.answer().locator(".text").hover()
    assert tab.page.evaluate("window.pwned") is None
    assert tab.page.evaluate("typeof document.getElementById('messages').append") == "function"


def test_the_policy_stops_what_would_slip_through(tab: Tab) -> None:
    refused = tab.page.evaluate(
        """() => {
          const html = "<img src=x onerror='window.pwned=1'>";
          try { document.body.insertAdjacentHTML("beforeend", html); }
          catch (error) { return error.name; }
        }"""
    )
    assert refused == "TypeError"
    blocked = tab.page.evaluate(
        """async () => {
          const seen = new Promise(done => addEventListener(
            "securitypolicyviolation", event => done(event.effectiveDirective)));
          fetch("https://tracker.example/").catch(() => {});
          return await seen;
        }"""
    )
    assert blocked == "connect-src"
    assert tab.page.evaluate("window.pwned") is None


LONG = (
    "word" * 120
    + "\n\n| "
    + " | ".join(["column"] * 12)
    + " |\n|"
    + "---|" * 12
    + "\n\n```\n"
    + "x" * 400
)


def test_a_phone(open_tab: OpenTab, upstream: FakeUpstream) -> None:
    tab = open_tab(viewport=PHONE, has_touch=True, is_mobile=True)
    tab.wait_for_state("online")
    assert not tab.page.locator("#settings").is_visible()
    tab.page.tap("#settings-button")
    assert tab.page.locator("#settings").is_visible()
    tab.page.tap("#settings-button")
    upstream.script = saying(LONG)
    tab.page.fill("#prompt", "Say something long")
    tab.page.tap("#send")
    tab.wait_for_text("wordword")
    tab.wait_for_end()
    assert tab.overflow() <= 0
    box = tab.page.locator("#send").bounding_box()
    assert box["y"] + box["height"] <= PHONE["height"]
    tab.page.tap("#tab-engine")
    tab.page.locator(".charts canvas").first.wait_for()
    assert tab.overflow() <= 0
    assert tab.errors == []


def test_the_keyboard_is_enough(tab: Tab, upstream: FakeUpstream) -> None:
    upstream.script = saying("typed")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("line one")
    tab.page.keyboard.press("Shift+Enter")
    tab.page.keyboard.type("line two")
    tab.page.keyboard.press("Enter")
    tab.wait_for_text("typed")
    assert tab.page.locator(".message.user .text").inner_text() == "line one\nline two"
    tab.page.focus("#tab-chat")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.locator("#view-engine").is_visible()
    assert tab.page.evaluate("document.activeElement.id") == "tab-engine"
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.locator("#view-chat").is_visible()


def test_colours_follow_the_system_and_the_button(open_tab: OpenTab) -> None:
    tab = open_tab(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = tab.page.evaluate(background)
    tab.page.click("#theme-button")  # light
    light = tab.page.evaluate(background)
    assert light != dark
    tab.page.reload()
    assert tab.page.evaluate(background) == light
    tab.page.click("#theme-button")  # dark
    assert tab.page.evaluate(background) == dark


def test_the_engine_view(tab: Tab, upstream: FakeUpstream) -> None:
    tokens = [0]

    def stats() -> dict[str, object]:
        tokens[0] += 100
        latency = {"bounds": [0.01, 0.03], "counts": [0, tokens[0], 0]}
        histograms = {"pocket_inter_token_latency_seconds": latency}
        return {
            **STATS,
            "generated_tokens": tokens[0],
            "steps": tokens[0],
            "histograms": histograms,
        }

    upstream.stats, before = stats, upstream.stats
    try:
        tab.page.click("#tab-engine")
        tab.page.locator("#tile-running", has_text="3").wait_for()
        tab.page.locator("#tile-between", has_text="20 ms").wait_for()
        assert tab.page.inner_text("#hint-between") == "p50; p95 29 ms"
        tab.page.locator("#tile-generated", has_text=re.compile(r"^\d+$")).wait_for()
        assert tab.page.inner_text("#tile-hits") == "25 %"
        assert "1 in use" in tab.page.inner_text("#kv-legend")
        label = tab.page.get_attribute("#kv-map", "aria-label")
        assert label == "KV blocks: 1 in use, 999 cached, 1,000 free"
        assert tab.page.locator(".charts canvas").count() == 4
    finally:
        upstream.stats = before
