"""Write screenshots of the panels with the starter models: ``python -m tests.browser.screenshots FOLDER``."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Locator, expect

from lmx_lab.panels.layout import PANELS
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.browser.jupyterlab import Tab, serving_jupyterlab
from tests.support.browser import chromium, machine_only

ROOT = Path(__file__).parent.parent.parent
HOME = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
MODELS = ("smollm2-135m", "minilm-l6")
WAIT_MS = 120_000
MAX_BYTES = 200_000
HEIGHT = 3000
WIDTHS = {"": 1400, "narrow-": 560}
"""Width of the panels in pixels, by the part of the name of a picture of all panels."""
SCALE = 1.5
"""Pixels of a picture of one panel for each pixel of the page."""
COLORS = 256
"""Number of colours of a picture; more make it larger and look the same."""
CELLS = (
    "import lmx_lab\nlab = lmx_lab.launch('smollm2-135m', embedder='minilm-l6', port=8400, loop='thread', daemon=True)",
    "lab.panel()",
    "lab.panel('lens')",
    "lab.panel('timeline')",
)
TIMELINE = """
import threading
story = lab.chat('Tell me a story.', stream=True, max_tokens=60, temperature=0)
texts = ['List some cities. ' * 60, 'Name three colours.']
threads = [threading.Thread(target=lab.chat, args=[text], kwargs={'max_tokens': 20}) for text in texts]
next(pieces := iter(story))
for thread in threads: thread.start()
for _ in pieces: pass
for thread in threads: thread.join()
"""
"""Requests of which one has a long prompt, so that others have slow steps."""
LENS = """
lens = lab.panel('lens')
reply = lab.chat('Write a long story about a lighthouse.', max_tokens=60, temperature=0, logprobs=5)
"""
QUESTIONS = ("Which city is the capital of France?", "And what is it known for?")
QUERY = "How salty is the sea?"
DOCUMENTS = (
    "Bread is baked in an oven.",
    "Sea water is about 3.5 percent salt.",
    "Water boils at 100 degrees.",
    "The Dead Sea is ten times as salty as the ocean.",
    "Salt was once worth its weight in gold.",
)
# Requests for the charts in addition to the chat, and a turn with a call that waits for a decision.
LOAD = """
for number in range(3): lab.chat(f'Write about the number {number}.', max_tokens=40)
from typing import Literal
@lab.daemon.tool
def weather(city: Literal['Rome', 'Oslo']) -> str:
    "The weather in a city."
    return 'sunny'
from lmx_lab.wire.sessions import TurnOverrides
session = lab.daemon.session(title='weather')
session.run('Say hello.', overrides=TurnOverrides(max_tokens=20))
forced = TurnOverrides(tool_choice='weather', max_tokens=40)
import threading
threading.Thread(target=session.run, args=['What is the weather in Rome?'], kwargs={'overrides': forced}).start()
"""


def main(folder: Path) -> None:
    """Write screenshots in the light and the dark theme: of each panel, and of all panels together in two widths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        Catalog(Settings(home=HOME)).fetch(name)
    expect.set_options(timeout=WAIT_MS)
    with tempfile.TemporaryDirectory() as own, chromium() as browser:
        # A home without sessions of earlier runs.
        home = Path(own, "home")
        home.mkdir()
        (home / "models").symlink_to(HOME / "models")
        with serving_jupyterlab(Path(own), home) as lab, machine_only(browser, device_scale_factor=SCALE) as context:
            tab = Tab(lab, context, "pictures")
            tab.page.set_default_timeout(WAIT_MS)
            prepare(tab)
            for theme in ("light", "dark"):
                tab.theme(theme)
                take_pictures(tab, folder, theme)
            tab.close_notebook()


def prepare(tab: Tab) -> None:
    """Fill each panel with content."""
    tab.lab.write("panels.ipynb", CELLS)
    tab.open("panels.ipynb")
    for number in range(len(CELLS)):
        tab.run(number)
    tab.kernel(LENS)
    lens = tab.panel("Lens")
    tokens = lens.get_by_role("listbox", name="tokens")
    expect(tokens.get_by_role("option").nth(30)).to_be_visible()
    tokens.get_by_role("option").nth(8).click()
    lens.get_by_role("button", name="branch with").nth(1).click()
    expect(lens.get_by_role("list", name="branches").get_by_role("listitem")).to_have_count(2)
    lens.get_by_label("follow").uncheck()
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
        expect(chat.locator(".assistant").last).to_contain_text("tok/s")
    rerank = tab.panel("Rerank")
    rerank.get_by_label("Query").fill(QUERY)
    rerank.get_by_label("Documents").fill("\n".join(DOCUMENTS))
    rerank.get_by_role("button", name="Rank").click()
    expect(rerank.locator("tbody tr")).to_have_count(len(DOCUMENTS))
    expect(tab.panel("Events")).to_contain_text("decision needed")
    fill_timeline(tab)
    tab.page.mouse.move(0, 0)


def fill_timeline(tab: Tab) -> None:
    """Fill the timeline panel, and explain its oldest request."""
    tab.kernel(TIMELINE)
    timeline = tab.panel("Timeline")
    expect(timeline.get_by_role("listitem").filter(has_text="running")).to_have_count(0)
    timeline.get_by_role("button", name="Pause").click()
    timeline.get_by_role("listitem").nth(2).get_by_role("button").click()
    expect(timeline.locator(".detail")).to_contain_text("The request took")


def take_pictures(tab: Tab, folder: Path, theme: str) -> None:
    grid = tab.outputs(1).locator(".widget-gridbox")
    for name, width in WIDTHS.items():
        # The notebook has margins, whose width does not depend on that of the window.
        for _ in range(2):
            box = grid.bounding_box()
            assert box is not None
            assert tab.page.viewport_size is not None
            margins = tab.page.viewport_size["width"] - box["width"]
            tab.page.set_viewport_size({"width": round(width + margins), "height": HEIGHT})
            tab.page.wait_for_timeout(1000)
        write(grid, folder / f"panels-{name}{theme}.png", scale="css")
        if not name:
            for panel in PANELS:
                write(tab.panel(panel.capitalize()), folder / f"{panel}-{theme}.png", scale="device")


def write(place: Locator, path: Path, *, scale: Literal["css", "device"]) -> None:
    content = place.screenshot(animations="disabled", caret="hide", scale=scale)
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    # This method keeps rare colours, such as those of states.
    picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE, kmeans=2).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path} {size / 1000:.0f} kB")
    assert size <= MAX_BYTES, f"{path} has {size} bytes; at most {MAX_BYTES} should be in the repository"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
