"""A real Chromium that reaches nothing but this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
# No name leads anywhere but to this machine: routes see no WebSockets.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-dev-shm-usage",  # which containers have little of
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
VIEWPORT = {"width": 1280, "height": 1600}
FOREIGN = re.compile(r"^(https?|wss?)://(?!(127\.0\.0\.1|localhost)[:/])")


@contextmanager
def chromium(arguments: Sequence[str] = ARGUMENTS) -> Iterator[Browser]:
    """One of its own; where there is none, the test is skipped."""
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}; on Debian: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@contextmanager
def machine_only(browser: Browser, **options: Any) -> Iterator[BrowserContext]:
    """A browser's window that reaches this machine and nothing else."""
    options = {"viewport": VIEWPORT, "service_workers": "block", "reduced_motion": "reduce", **options}
    context = browser.new_context(**options)
    context.route(FOREIGN, lambda route: route.abort())
    try:
        yield context
    finally:
        context.close()
