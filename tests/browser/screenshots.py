"""Write screenshots of the panels with the starter models: ``python -m tests.browser.screenshots FOLDER``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import expect

from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog
from tests.browser.chromium import chromium, machine_only
from tests.browser.jupyterlab import JupyterLab, Tab

ROOT = Path(__file__).parent.parent.parent
HOME = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
MODELS = ("smollm2-135m", "minilm-l6")
WAIT_MS = 120_000
MAX_BYTES = 200_000
WINDOW = {"viewport": {"width": 1180, "height": 1500}, "device_scale_factor": 1.5}
CELLS = (
    "import lmx_lab\nlab = lmx_lab.launch('smollm2-135m', embedder='minilm-l6', port=8400, loop='thread')",
    "lab.panel()",
)
QUESTIONS = ("What is the capital of France?", "And what is it known for?")
QUERY = "How salty is the sea?"
DOCUMENTS = (
    "Bread is baked in an oven.",
    "Sea water is about 3.5 percent salt.",
    "Water boils at 100 degrees.",
    "The Dead Sea is ten times as salty as the ocean.",
    "Salt was once worth its weight in gold.",
)
# Requests for the charts, in addition to the chat.
LOAD = "for number in range(3): lab.chat(f'Write about the number {number}.', max_tokens=40)"


def main(folder: Path) -> None:
    """Write a screenshot of each panel and of all panels together, in the light and the dark theme."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        Catalog(Settings(home=HOME)).fetch(name)
    expect.set_options(timeout=WAIT_MS)
    with tempfile.TemporaryDirectory() as own, chromium() as browser:
        lab = JupyterLab(Path(own), HOME)
        try:
            with machine_only(browser, **WINDOW) as context:
                tab = Tab(lab, context, "pictures")
                tab.page.set_default_timeout(WAIT_MS)
                prepare(tab)
                for theme in ("light", "dark"):
                    tab.theme(theme)
                    picture(tab, folder, theme)
                tab.close_notebook()
        finally:
            lab.close()


def prepare(tab: Tab) -> None:
    """Fill each panel with content."""
    tab.lab.write("panels.ipynb", CELLS)
    tab.open("panels.ipynb")
    for number in range(len(CELLS)):
        tab.run(number)
    tab.kernel(LOAD)
    chat = tab.panel("Chat")
    chat.locator("summary", has_text="sampling").click()
    chat.get_by_label("max_tokens").fill("40")
    chat.get_by_label("temperature").fill("0")
    chat.locator("summary", has_text="sampling").click()
    for number, question in enumerate(QUESTIONS, 1):
        chat.get_by_label("message").fill(question)
        chat.get_by_role("button", name="Send").click()
        expect(chat.locator(".assistant")).to_have_count(number)
        expect(chat.locator(".assistant").last).to_contain_text("tokens/s")
    rerank = tab.panel("Rerank")
    rerank.get_by_label("Query").fill(QUERY)
    rerank.get_by_label("Documents").fill("\n".join(DOCUMENTS))
    rerank.get_by_role("button", name="Rank").click()
    expect(rerank.locator("tbody tr")).to_have_count(len(DOCUMENTS))
    tab.page.mouse.move(0, 0)


def picture(tab: Tab, folder: Path, theme: str) -> None:
    tab.page.wait_for_timeout(1000)
    places = {name: tab.panel(name.capitalize()) for name in ("models", "metrics", "chat", "rerank")}
    places["panels"] = tab.outputs(1).locator(".widget-gridbox")
    for name, place in places.items():
        path = folder / f"{name}-{theme}.png"
        place.screenshot(path=path, animations="disabled", caret="hide", scale="css" if name == "panels" else "device")
        size = path.stat().st_size
        print(f"{path} {size / 1000:.0f} kB")
        assert size <= MAX_BYTES, f"{path} has {size} bytes; at most {MAX_BYTES} should be in the repository"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
