"""Take docs/assets/console-*.png of a running gateway, with `make browser-test`'s browser.

    .venv/bin/pocketllm serve --gateway-port 9000 --kv-cache-tokens 8192 &
    python tools/console_screenshots.py http://127.0.0.1:9000

Eight clients keep the engine busy for a minute, so that there is something to see.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from chromium import MISSING, chromium  # noqa: E402

SECONDS = 60.0
CLIENTS = 8
QUESTION = "List three facts about the Moon, as a bulleted list."
STORIES = ("a fox", "the sea", "an old clock", "two friends", "a long winter")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of the gateway, without API keys")
    url = parser.parse_args().url.rstrip("/")
    if MISSING:
        sys.exit(MISSING)
    until = time.monotonic() + SECONDS
    load = [threading.Thread(target=ask, args=(url, i, until)) for i in range(CLIENTS)]
    with chromium() as browser:
        wide = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        wide.goto(f"{url}/#engine")
        for thread in load:
            thread.start()
        wide.wait_for_timeout(SECONDS * 1000 - 8000)
        wide.screenshot(path=ROOT / "docs/assets/console-engine.png")
        for thread in load:
            thread.join()
        phone = browser.new_page(viewport={"width": 390, "height": 700}, color_scheme="dark")
        phone.goto(url)
        phone.click("#settings-button")
        phone.fill('[name="temperature"]', "0")
        phone.click("#settings-button")
        phone.fill("#prompt", QUESTION)
        phone.keyboard.press("Enter")
        phone.locator("#send:not([hidden])").wait_for(timeout=120_000)
        phone.screenshot(path=ROOT / "docs/assets/console-chat.png")
    return 0


def ask(url: str, client: int, until: float) -> None:
    """One answer after the other, with a pause that differs from client to client."""
    number = 0
    while time.monotonic() < until:
        story = STORIES[number % len(STORIES)]
        messages = [
            {"role": "system", "content": "You tell short stories to children. " * 8},
            {"role": "user", "content": f"Tell me story {client} about {story}."},
        ]
        body = {"model": "pocketllm", "messages": messages, "max_tokens": 60, "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
        number += 1
        time.sleep(0.5 * client)


if __name__ == "__main__":
    sys.exit(main())
