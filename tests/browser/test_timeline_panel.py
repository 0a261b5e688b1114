"""Test the timeline panel: bars, keyboard, themes, narrow windows, and following many requests without growth."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.axe import serious_violations
from tests.browser.jupyterlab import JupyterLab, Tab
from tests.browser.test_themes import CONTRASTS, MIN_CONTRAST

NOTEBOOK = "timeline.ipynb"
CHATS = "for number in range({count}): lab.chat(f'hello wide sea {{number}}', max_tokens=6)"
NODES = "(node) => node.querySelectorAll('*').length"
MAX_LANES = 20


@pytest.fixture(scope="module")
def timeline(tab: Tab, jupyterlab: JupyterLab) -> Iterator[Tab]:
    """A notebook with the timeline panel of an echo lab."""
    launch = "import lmx_lab\nlab = lmx_lab.launch('echo', port=0, loop='thread')"
    jupyterlab.write(NOTEBOOK, [launch, "lab.panel('timeline')"])
    tab.open(NOTEBOOK)
    tab.run(0)
    tab.run(1)
    yield tab
    tab.open(NOTEBOOK)
    tab.close_notebook()


def test_requests_are_explained_and_the_view_is_paused_by_keyboard(timeline: Tab) -> None:
    panel, page = timeline.panel("Timeline"), timeline.page
    expect(panel.get_by_text("No request has run yet")).to_be_visible()
    timeline.kernel(CHATS.format(count=1))
    lanes = panel.get_by_role("listitem")
    expect(lanes).to_have_count(1)
    expect(panel.get_by_text("No request has run yet")).to_be_hidden()
    # A slow step divides the decode steps into two parts.
    expect(lanes.first.locator(".decode").first).to_be_visible()
    assert "queued" in (lanes.first.get_by_role("img").get_attribute("aria-label") or "")
    lanes.first.get_by_role("button").press("Enter")
    expect(panel.locator(".detail")).to_contain_text("The request took")
    panel.get_by_role("button", name="Pause").press("Enter")
    expect(panel.get_by_role("button", name="Resume")).to_be_focused()
    timeline.kernel(CHATS.format(count=1))
    panel.get_by_role("button", name="Resume").press("Enter")
    expect(lanes).to_have_count(2)
    lanes.last.get_by_role("button").focus()
    timeline.kernel(CHATS.format(count=1))
    expect(lanes).to_have_count(3)
    # The requests that were there before keep the focus.
    assert page.evaluate("document.activeElement.closest('li') !== null")


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_panel_is_accessible_and_readable_in_both_themes_and_in_400_pixels(timeline: Tab, theme: str) -> None:
    panel = timeline.panel("Timeline")
    timeline.kernel(CHATS.format(count=1))
    expect(panel.get_by_role("listitem").first).to_be_visible()
    timeline.theme(theme)
    try:
        panel.get_by_role("listitem").first.get_by_role("button").press("Enter")
        expect(panel.locator(".detail")).to_be_visible()
        violations = serious_violations(timeline.page, ".jp-Notebook:not(.lm-mod-hidden) .lmx")
        contrasts = panel.first.evaluate(CONTRASTS)
        overflow = panel.first.evaluate(
            "(node) => { node.style.width = '400px'; const over = node.scrollWidth - node.clientWidth;"
            " node.style.width = ''; return over; }"
        )
    finally:
        timeline.theme("light")
    assert violations == []
    assert {text: contrast for text, contrast in contrasts if contrast < MIN_CONTRAST} == {}
    assert overflow <= 0


def test_the_view_does_not_grow_with_the_number_of_requests(timeline: Tab) -> None:
    panel = timeline.panel("Timeline")
    lanes = panel.get_by_role("listitem")
    sizes = []
    for _ in range(3):
        timeline.kernel(CHATS.format(count=2 * MAX_LANES))
        expect(lanes).to_have_count(MAX_LANES)
        sizes.append(panel.first.evaluate(NODES))
    assert max(sizes) <= 1.2 * sizes[0]
