"""Check pages with axe-core, which the package ``axe-playwright-python`` contains."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Page

IMPACTS = ("serious", "critical")
RUN = """async (selector) => (await axe.run(selector ?? document, {resultTypes: ["violations"]})).violations"""


@cache
def _source() -> str:
    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


def serious_violations(page: Page, selector: str | None = None) -> list[str]:
    """Return the serious and critical violations in the page, or in all elements that match a selector."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(_source())
    found: list[dict[str, Any]] = page.evaluate(RUN, selector)
    return [
        f"{violation['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for violation in found
        if violation["impact"] in IMPACTS
        for node in violation["nodes"]
    ]
