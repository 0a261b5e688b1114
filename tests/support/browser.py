"""Drive Chromium and JupyterLab as a user of a notebook does, and use the panels in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
# All names resolve to this machine, because routes do not intercept WebSockets.
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-dev-shm-usage",  # Containers have little shared memory.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
VIEWPORT = {"width": 1280, "height": 1600}
FOREIGN = re.compile(r"^(https?|wss?)://(?!(127\.0\.0\.1|localhost)[:/])")


@contextmanager
def chromium(arguments: Sequence[str] = CHROMIUM_ARGUMENTS) -> Iterator[Browser]:
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


RUN_AXE = """async (selector) => (await axe.run(selector ?? document, {resultTypes: ["violations"]})).violations"""


def serious_violations(page: Page, selector: str | None = None) -> list[str]:
    """Return the serious and critical violations in the page, or in all elements that match a selector."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = page.evaluate(RUN_AXE, selector)
    return [
        f"{violation['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for violation in found
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


WAIT_MS = 60_000
