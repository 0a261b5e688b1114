"""Test that all panels are accessible and that their text has enough contrast, in the light and the dark theme."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.axe import serious_violations
from tests.browser.conftest import LAUNCH
from tests.browser.jupyterlab import Tab
from tests.browser.test_chat_panel import ask
from tests.browser.test_rerank_panel import DOCUMENTS, rank

MIN_CONTRAST = 4.5
"""WCAG 2.2, 1.4.3, level AA."""
# Returns the contrast of each visible text to its background. Colours are painted on a canvas, to convert any notation
# to numbers and to blend translucent colours with the colours behind them.
CONTRASTS = """(root) => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const over = (below, color, opacity = 1) => {
        canvas.globalAlpha = 1;
        canvas.fillStyle = `rgb(${below.join()})`;
        canvas.fillRect(0, 0, 1, 1);
        canvas.globalAlpha = opacity;
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const ancestors = (node) => (node ? [...ancestors(node.parentElement), node] : []);
    const behind = (node) => ancestors(node).reduce(
        (below, each) => over(below, getComputedStyle(each).backgroundColor), [255, 255, 255]);
    const opacity = (node) => ancestors(node).reduce((all, each) => all * getComputedStyle(each).opacity, 1);
    const light = (color) => {
        const [r, g, b] = color.map((part) => part / 255).map((part) =>
            part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (node, style) => {
        const below = behind(node);
        const [dark, bright] = [light(below), light(over(below, style.color, opacity(node)))].sort((a, b) => a - b);
        return (bright + 0.05) / (dark + 0.05);
    };
    const found = [];
    const seen = (node) => {
        const {width, height} = node.getBoundingClientRect();
        return width > 1 && height > 1 && node.checkVisibility({visibilityProperty: true});
    };
    const note = (node, text, pseudo) => {
        const style = getComputedStyle(node, pseudo);
        if (text.trim() && seen(node)) found.push([text.trim().slice(0, 60), contrast(node, style)]);
    };
    for (const node of root.querySelectorAll("*")) {
        const own = [...node.childNodes].filter((each) => each.nodeType === 3).map((each) => each.data).join("");
        if (!node.matches("input, textarea, select")) note(node, own);
        else if (node.value) note(node, node.value);
        else note(node, node.placeholder ?? "", "::placeholder");
    }
    return found;
}"""
GRID = ".jp-Notebook:not(.lm-mod-hidden) .widget-gridbox"
PANELS = ("Models", "Metrics", "Chat", "Rerank")


def fill(tab: Tab) -> None:
    """Show text in all parts of the panels: an answer, a ranking, an error, and opened details."""
    chat = ask(tab, "What can be read?")
    expect(chat.locator(".assistant").last).to_contain_text("40 tokens")
    rank(tab, "\n".join(DOCUMENTS))
    tab.panel("Models").get_by_label("model to load").fill("nothing/like-this")
    tab.page.keyboard.press("Enter")
    expect(tab.panel("Models").get_by_role("alert")).to_contain_text("nothing/like-this")


def contrasts(tab: Tab) -> dict[str, float]:
    """Return the lowest contrast of each text."""
    found: dict[str, float] = {}
    for name in PANELS:
        for text, contrast in tab.panel(name).first.evaluate(CONTRASTS):
            found[f"{name}: {text}"] = min(contrast, found.get(f"{name}: {text}", 21))
    return found


def test_the_contrast_measurement_is_correct(tab: Tab) -> None:
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
def test_the_panels_are_accessible_and_all_text_has_enough_contrast(panels: Tab, theme: str) -> None:
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
        panels.kernel(LAUNCH.format(loop="thread"))
        panels.theme("light")
    assert violations == []
    assert len(running) > 60
    assert {text: contrast for text, contrast in (running | stopped).items() if contrast < MIN_CONTRAST} == {}
    assert {text: contrast for text, contrast in running.items() if contrast < MIN_CONTRAST} == {}
