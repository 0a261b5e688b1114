"""Test that all panels are accessible and that their text has enough contrast, in the light and the dark theme."""

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import CONTRASTS, DOCUMENTS, LAUNCH, MIN_CONTRAST, ask, rank
from tests.support.browser import serious_violations

GRID = ".jp-Notebook:not(.lm-mod-hidden) .widget-gridbox"
PANELS = ("Models", "Metrics", "Chat", "Rerank")


def fill(tab):
    """Show text in all parts of the panels: an answer, a ranking, an error, and opened details."""
    chat = ask(tab, "What can be read?")
    expect(chat.locator(".assistant").last).to_contain_text("40 tokens")
    rank(tab, "\n".join(DOCUMENTS))
    tab.panel("Models").get_by_label("model to load").fill("nothing/like-this")
    tab.page.keyboard.press("Enter")
    expect(tab.panel("Models").get_by_role("alert")).to_contain_text("nothing/like-this")
    fold_models(tab)
    expect(tab.panel("Models").get_by_role("list", name="list of what is stored")).to_contain_text("tiny-bert")


def fold_models(tab):
    """Open the options and the storage in the models panel, or close them again."""
    tab.panel("Models").get_by_role("button", name="options", exact=True).click()
    tab.panel("Models").get_by_text("storage", exact=True).click()


def contrasts(tab):
    """Return the lowest contrast of each text."""
    found = {}
    for name in PANELS:
        for text, contrast in tab.panel(name).first.evaluate(CONTRASTS):
            found[f"{name}: {text}"] = min(contrast, found.get(f"{name}: {text}", 21))
    return found


def test_the_contrast_measurement_is_correct(tab):
    tab.page.evaluate(
        """() => document.body.insertAdjacentHTML("beforeend", `<div id="measured" style="background: #fff">
            <p style="color: #767676">just enough</p><p style="color: #000; opacity: 0.5">faded</p>
            <div style="background: rgb(0 0 0 / 50%)"><p style="color: oklch(1 0 0)">over grey</p></div>
            <p style="visibility: hidden">unseen</p></div>`)"""
    )
    measured = dict(tab.page.locator("#measured").evaluate(CONTRASTS))
    tab.page.evaluate("document.getElementById('measured').remove()")
    assert measured == {
        "just enough": pytest.approx(4.54, abs=0.1),
        "faded": pytest.approx(3.95, abs=0.1),
        "over grey": pytest.approx(3.95, abs=0.1),
    }


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_panels_are_accessible_and_all_text_has_enough_contrast(panels, theme):
    panels.theme(theme)
    try:
        fill(panels)
        running = contrasts(panels)
        violations = serious_violations(panels.page, GRID)
        panels.kernel("lab.stop()")
        expect(panels.panel("Rerank").locator(".state")).to_have_text("stopped")
        stopped = contrasts(panels)
        violations += serious_violations(panels.page, GRID)
    finally:
        fold_models(panels)
        panels.kernel(LAUNCH.format(loop="thread"))
        panels.theme("light")
    assert violations == []
    assert len(running) > 60
    assert {text: contrast for text, contrast in (running | stopped).items() if contrast < MIN_CONTRAST} == {}
    assert {text: contrast for text, contrast in running.items() if contrast < MIN_CONTRAST} == {}
