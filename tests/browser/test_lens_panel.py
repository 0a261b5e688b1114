"""Test the lens panel: keyboard, branches, 4,000 tokens, themes, narrow windows, and its content without a kernel."""

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import check_readable

PANEL = "lens"
"""The panel that ``one_panel`` shows."""
SHORT = "lab.chat('<think>mm</think>hello wide sea', temperature=0, logprobs=3)"
WITHOUT_ENTROPIES = """panel = lab.workbench.panels['lens']
panel.answer = {**panel.answer, 'tokens': [[*token[:3], None, *token[4:]] for token in panel.answer['tokens']]}"""
"""Removes the entropies in the view, as after an answer of llama.cpp."""
LONG = "lab.chat('hello wide sea ', temperature=0, ignore_eos=True, max_tokens=4000, logprobs=3)"
# Scrolls by a part of the height in each of 60 frames, and returns the median time between two frames in milliseconds.
SCROLL = """async (node) => {
    const times = [];
    for (let frame = 0; frame < 60; frame++) {
        node.scrollTop = (frame / 60) * node.scrollHeight;
        times.push(await new Promise(requestAnimationFrame));
    }
    return times.slice(1).map((time, at) => time - times[at]).sort((one, other) => one - other)[30];
}"""
SMOOTH_MS = 200
"""It is generous, because other tests may use the processors."""


def test_tokens_alternatives_and_branches_are_used_by_keyboard(one_panel):
    panel, page = one_panel.panel("Lens"), one_panel.page
    expect(panel.get_by_text("No answer yet")).to_be_visible()
    one_panel.kernel(SHORT)
    tokens = panel.get_by_role("listbox", name="tokens")
    expect(tokens).to_contain_text("hello·wide·sea")
    assert panel.locator(".reasoning").count() >= 3
    tokens.focus()
    expect(panel.locator(".detail")).to_contain_text("token 0")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    current = panel.locator(".current")
    expect(current).to_have_text("·sea")
    expect(current).to_have_attribute("aria-selected", "true")
    assert tokens.get_attribute("aria-activedescendant") == current.get_attribute("id")
    expect(panel.locator(".detail tbody tr")).to_have_count(3)
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    chosen = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    rows = panel.get_by_role("list", name="branches").get_by_role("listitem")
    expect(rows).to_have_count(2)
    expect(rows.last).to_contain_text("branch 1")
    expect(tokens).to_contain_text(f"hello·wide{chosen}")
    rows.first.get_by_role("button", name="answer", exact=True).press("Enter")
    expect(tokens).to_contain_text("hello·wide·sea")
    tokens.get_by_role("option", name="·sea").hover()
    expect(panel.locator(".detail")).to_contain_text("100.00 %")
    rows.last.get_by_role("button", name="remove branch 1").press("Enter")
    expect(rows).to_have_count(0)
    panel.get_by_label("Colour").select_option("entropy")
    missing = panel.get_by_role("button", name="Compute the entropies")
    expect(missing).to_have_count(0)
    one_panel.kernel(WITHOUT_ENTROPIES)
    colored = panel.locator(".tokens [class*=step]")
    expect(colored).to_have_count(0)
    missing.press("Enter")
    expect(colored).not_to_have_count(0)
    expect(missing).to_have_count(0)


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_panel_is_accessible_and_readable_in_both_themes_and_in_400_pixels(one_panel, theme):
    panel = one_panel.panel("Lens")
    one_panel.kernel(SHORT)
    tokens = panel.get_by_role("listbox", name="tokens")
    expect(tokens).to_contain_text("hello·wide·sea")

    def open_details():
        tokens.focus()
        one_panel.page.keyboard.press("Home")

    check_readable(one_panel, "Lens", theme, open_details)


def test_4000_tokens_scroll_smoothly_and_are_in_the_saved_notebook(one_panel):
    panel = one_panel.panel("Lens")
    one_panel.kernel(LONG)
    tokens = panel.get_by_role("listbox", name="tokens")
    expect(tokens.locator("span")).to_have_count(4000)
    assert tokens.evaluate(SCROLL) < SMOOTH_MS
    panel.get_by_label("Colour").select_option("rank")
    expect(panel.locator(".legend")).to_contain_text("≤ 20")
    tokens.focus()
    one_panel.page.keyboard.press("End")
    expect(panel.locator(".detail")).to_contain_text("token 3999")
    page = one_panel.kernel("print(lab.panel('lens').snapshot_html().count('<span'))")
    assert page is None or "40" in str(page)
