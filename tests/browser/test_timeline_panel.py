"""Test the timeline panel: bars, keyboard, themes, narrow windows, and following many requests without growth."""

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import check_readable

PANEL = "timeline"
"""The panel that ``one_panel`` shows."""
CHATS = "for number in range({count}): lab.chat(f'hello wide sea {{number}}', max_tokens=6)"
NODES = "(node) => node.querySelectorAll('*').length"
MAX_LANES = 20


def test_requests_are_explained_and_the_view_is_paused_by_keyboard(one_panel):
    panel, page = one_panel.panel("Timeline"), one_panel.page
    # Before the first request, the load of the model is shown.
    expect(panel.get_by_role("listitem")).to_contain_text("load echo")
    expect(panel.get_by_text("No request has run yet")).to_be_hidden()
    one_panel.kernel(CHATS.format(count=1))
    lanes = panel.get_by_role("listitem").filter(has_text="tokens")
    expect(lanes).to_have_count(1)
    # A slow step divides the decode steps into two parts.
    expect(lanes.first.locator(".decode").first).to_be_visible()
    assert "queued" in (lanes.first.get_by_role("img").get_attribute("aria-label") or "")
    lanes.first.get_by_role("button").press("Enter")
    expect(panel.locator(".detail")).to_contain_text("The request took")
    panel.get_by_role("button", name="Pause").press("Enter")
    expect(panel.get_by_role("button", name="Resume")).to_be_focused()
    one_panel.kernel(CHATS.format(count=1))
    panel.get_by_role("button", name="Resume").press("Enter")
    expect(lanes).to_have_count(2)
    lanes.last.get_by_role("button").focus()
    one_panel.kernel(CHATS.format(count=1))
    expect(lanes).to_have_count(3)
    # The requests that were there before keep the focus.
    assert page.evaluate("document.activeElement.closest('li') !== null")


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_panel_is_accessible_and_readable_in_both_themes_and_in_400_pixels(one_panel, theme):
    panel = one_panel.panel("Timeline")
    one_panel.kernel(CHATS.format(count=1))
    expect(panel.get_by_role("listitem").first).to_be_visible()

    def open_details():
        panel.get_by_role("listitem").first.get_by_role("button").press("Enter")
        expect(panel.locator(".detail")).to_be_visible()

    check_readable(one_panel, "Timeline", theme, open_details)


def test_the_view_does_not_grow_with_the_number_of_requests(one_panel):
    panel = one_panel.panel("Timeline")
    lanes = panel.get_by_role("listitem")
    sizes = []
    for _ in range(3):
        one_panel.kernel(CHATS.format(count=2 * MAX_LANES))
        expect(lanes).to_have_count(MAX_LANES)
        sizes.append(panel.first.evaluate(NODES))
    assert max(sizes) <= 1.2 * sizes[0]
