"""Start Chromium so that it can reach only this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
# All names resolve to this machine, because routes do not intercept WebSockets.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-dev-shm-usage",  # Containers have little shared memory.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
VIEWPORT = {"width": 1280, "height": 1600}
FOREIGN = re.compile(r"^(https?|wss?)://(?!(127\.0\.0\.1|localhost)[:/])")


@contextmanager
def chromium(arguments: Sequence[str] = ARGUMENTS) -> Iterator[Browser]:
    """A browser of its own. Skips the test if Chromium is not installed."""
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}; on Debian: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@contextmanager
def machine_only(browser: Browser, **options: Any) -> Iterator[BrowserContext]:
    """A context of a browser that can reach only this machine."""
    options = {"viewport": VIEWPORT, "service_workers": "block", "reduced_motion": "reduce", **options}
    context = browser.new_context(**options)
    context.route(FOREIGN, lambda route: route.abort())
    try:
        yield context
    finally:
        context.close()
