"""Debian's Chromium for tests of the web console, through Playwright."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = (
    "playwright is not installed (requirements/browser.txt)"
    if importlib.util.find_spec("playwright") is None
    else "chromium is not installed"
    if CHROMIUM is None
    else ""
)
"""Why there is no browser; empty if there is one."""


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser (``playwright.sync_api.Browser``)."""
    from playwright.sync_api import sync_playwright

    # Chromium refuses its sandbox to root, as containers and CI machines have it.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()
