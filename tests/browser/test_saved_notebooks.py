"""Test saved notebooks: their size, and what they display without a kernel."""

import json
import re
import subprocess
import sys

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import LAUNCH, panel_names, updates
from tests.support.browser import serious_violations
from tests.support.docs import ROOT

MAX_BYTES = 300_000
UPDATES = 1000
NAME = "saved.ipynb"
QUESTION = "What was asked after the panel was shown?"
# A clock that is 100 times as fast, and no pause between two messages.
FASTER = "usual = lab.workbench.tick_s, lab.workbench.frame_s; lab.workbench.tick_s, lab.workbench.frame_s = 0.004, 0"
SLOWER = "lab.workbench.tick_s, lab.workbench.frame_s = usual"
# A command that toggles the setting.
SAVE_STATE = "@jupyter-widgets/jupyterlab-manager:saveWidgetState"
NOT_FOUND = "widget model not found"
WITHOUT_KERNEL = "reading 'kernel'"


@pytest.fixture(scope="module")
def saved(tab, jupyterlab):
    """A saved notebook with panels and a lab, whose kernel has ended. Returns the address of the lab."""
    jupyterlab.write(NAME, [LAUNCH.format(loop="thread"), "lab", "lab.panel()", "lab.panel('rerank')"])
    tab.open(NAME)
    for cell in range(4):
        tab.run(cell)
    url = tab.kernel("print(lab.url)")
    for text in (url, "tiny"):
        expect(tab.outputs(1)).to_contain_text(text)
    expect(tab.panel("Models")).to_have_count(2)
    tab.kernel(f"lab.workbench.submit(lab.workbench.panels['chat'].do_send({{'text': {QUESTION!r}}})).result()")
    expect(tab.outputs(2).locator(".lmx-snapshot")).to_contain_text(QUESTION)
    tab.save()
    tab.close_notebook()
    return url


@pytest.fixture
def closing(tab):
    yield
    tab.close_notebook()


@pytest.mark.long
def test_a_thousand_updates_do_not_grow_the_notebook(panels, jupyterlab):
    (metrics,) = [comm for comm, name in panel_names(panels).items() if name == "metrics"]
    expect(panels.panel("Metrics").locator("canvas").first).to_be_visible()
    # Hidden, because a browser cannot draw so often.
    panels.command("notebook:hide-all-cell-outputs")
    seen = len(panels.messages)
    panels.kernel(FASTER)
    try:
        panels.wait(lambda: updates(panels.messages[seen:])[metrics] >= UPDATES, f"there are {UPDATES} updates")
    finally:
        panels.kernel(SLOWER)
        panels.command("notebook:show-all-cell-outputs")
    panels.command(SAVE_STATE)
    panels.save()
    panels.command(SAVE_STATE)
    text = (jupyterlab.folder / "panels.ipynb").read_text(encoding="utf-8")
    states = json.loads(text)["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert metrics in states
    assert len(text) < MAX_BYTES


def test_without_a_kernel_the_snapshot_is_shown(tab, saved, closing):
    tab.open(NAME, kernel=False)
    expect(tab.outputs(1)).to_contain_text(saved)
    expect(tab.outputs(2)).to_contain_text("tiny-two")
    expect(tab.outputs(2)).to_contain_text("Metrics")
    expect(tab.outputs(2)).to_contain_text(QUESTION)
    expect(tab.outputs(2).get_by_text(re.compile(r"^as of [\d-]{10} [\d:]{8}$"))).to_be_visible()
    charts = tab.outputs(2).locator("img[alt^='Decode']")
    expect(charts).to_have_count(1)
    assert charts.evaluate("image => image.complete && image.naturalWidth > 0")
    expect(tab.outputs(3)).to_contain_text("Rerank: no result yet")
    violations = []
    for theme in ("dark", "light"):
        tab.theme(theme)
        violations += serious_violations(tab.page, ".lmx-snapshot")
    assert violations == []
    for cell in (1, 2, 3):
        expect(tab.outputs(cell).get_by_text("Loading widget")).to_be_hidden()
    # This error always occurs, at any time after the notebook was opened: jupyterlab-manager requests the kernel's id.
    tab.wait(lambda: any(WITHOUT_KERNEL in each for each in tab.complaints), "JupyterLab misses a kernel")
    tab.forgive(WITHOUT_KERNEL)


def test_with_a_new_kernel_the_snapshot_is_shown_until_the_cell_runs_again(tab, saved, closing):
    tab.open(NAME)
    tab.wait(lambda: any(NOT_FOUND in each for each in tab.complaints), "JupyterLab misses the widgets")
    expect(tab.outputs(1).get_by_text("model not found")).to_have_count(1)
    expect(tab.outputs(1).get_by_text("model not found")).to_be_hidden()
    expect(tab.outputs(1).get_by_text(saved)).to_be_visible()
    tab.run(0)
    tab.run(1)
    expect(tab.panel("Models").first).to_be_visible()
    expect(tab.outputs(1).locator(".lmx-snapshot")).to_be_hidden()
    tab.forgive(NOT_FOUND)


def test_converted_to_html_the_snapshot_is_shown_once(saved, jupyterlab):
    command = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "html", "--stdout", jupyterlab.folder / NAME]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count(saved) == 2, "in the outputs of two cells"
    assert "tiny-two" in done.stdout
    assert "Rerank: no result yet" in done.stdout
    assert QUESTION in done.stdout
    assert '<script type="application/vnd.jupyter.widget-view+json">' not in done.stdout


@pytest.mark.long
def test_a_copy_of_a_notebook_of_the_course_is_not_changed_by_opening_it(tab, jupyterlab, closing):
    command = [sys.executable, ROOT / "tools" / "course.py", jupyterlab.folder / "course"]
    subprocess.run(command, check=True)
    tab.open("course/20_token_lens.ipynb")
    current = "window.jupyterapp.shell.currentWidget.context.model"
    # JupyterLab has added what the kernel says about its language.
    tab.page.wait_for_function(f"() => {current}.sharedModel.getMetadata('language_info')?.version")
    assert tab.page.evaluate(f"() => {current}.dirty") is False
