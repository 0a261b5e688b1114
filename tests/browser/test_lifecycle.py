"""Test notebooks whose kernel restarts or dies, whose cells run again, or that attach to another notebook's lab."""

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import ask_echo

NAME = "lifecycle.ipynb"
ATTACHED = "attached.ipynb"
SHOWN = 1
"""Index of the cell that displays the panels."""
NOTES = ".lmx > .shared:visible"
"""The notes of all panels that are displayed."""
PANELS = ("Models", "Metrics", "Chat", "Rerank")
NOT_FOUND = "widget model not found"
CANCELLED = "create_subshell_request message before replies were done"
"""Part of a message of JupyterLab about a request to a kernel that has died."""


@pytest.fixture(scope="module")
def opened(tab, jupyterlab):
    """A notebook whose lab runs on the kernel's loop."""
    jupyterlab.write(
        NAME,
        [
            "import lmx_lab\nlab = lmx_lab.launch('echo', port=0)",
            "lab.panel()",
            "assert lab.chat('ready').text == 'ready'",
        ],
    )
    tab.open(NAME)
    yield tab
    tab.open(NAME)
    tab.close_notebook()


@pytest.fixture
def notebook(opened):
    """The notebook after all of its cells have run."""
    opened.open(NAME)
    run_all(opened)
    return opened


def run_all(tab):
    tab.command("notebook:run-all-cells")
    for name in PANELS:
        expect(tab.panel(name)).to_have_count(1)
    expect(tab.panel("Models").locator(".state")).to_have_text("running")
    assert tab.kernel("print(lab.panel() is not None)") == "True"


def test_running_all_cells_again_keeps_the_lab_and_the_conversation(notebook):
    url = notebook.kernel("print(lab.url)")
    chat = ask_echo(notebook, "Before.")
    run_all(notebook)
    assert notebook.kernel("print(lab.url)") == url
    expect(chat.locator(".assistant .text:not(.dim)").last).to_have_text("Before.")
    ask_echo(notebook, "After.")
    expect(notebook.page.locator(NOTES)).to_have_count(0)


def test_a_restarted_kernel_shows_one_note_until_the_cells_run_again(notebook):
    notebook.restart()
    for name in PANELS:
        expect(notebook.panel(name).locator(".state")).to_have_text("disconnected")
    expect(notebook.page.locator(NOTES)).to_have_count(1)
    expect(notebook.panel("Models").locator(".shared")).to_contain_text("run the cells again")
    run_all(notebook)
    expect(notebook.page.locator(NOTES)).to_have_count(0)
    ask_echo(notebook, "And now?")
    notebook.forgive(NOT_FOUND)


def test_a_second_notebook_attaches_to_the_lab_of_the_first(notebook, jupyterlab):
    url = notebook.kernel("print(lab.url)")
    jupyterlab.write(ATTACHED, [f"import lmx_lab\nlab = lmx_lab.attach({url!r})", "lab.panel()"])
    notebook.open(ATTACHED)
    try:
        run_all(notebook)
        expect(notebook.panel("Chat").locator(".name")).to_have_text("echo")
        ask_echo(notebook, "From the second notebook.")
        notebook.panel("Models").get_by_role("button", name="Unload echo").click()
        expect(notebook.panel("Chat").locator(".name")).to_have_text("no model is loaded")
        notebook.open(NAME)
        expect(notebook.panel("Chat").locator(".name")).to_have_text("no model is loaded")
        expect(notebook.panel("Chat").get_by_text("From the second notebook.")).to_have_count(0)
        notebook.kernel("lab.load('echo')")
        notebook.open(ATTACHED)
        expect(notebook.panel("Chat").locator(".name")).to_have_text("echo")
        notebook.open(NAME)
        notebook.kernel("lab.stop()")
        notebook.open(ATTACHED)
        expect(notebook.panel("Models").locator(".state")).to_have_text("unreachable")
        expect(notebook.page.locator(NOTES)).to_have_count(1)
    finally:
        notebook.open(ATTACHED)
        notebook.close_notebook()


def test_a_notebook_reopened_after_its_kernel_died_shows_what_was_seen(notebook):
    ask_echo(notebook, "Remember this.")
    expect(notebook.outputs(SHOWN).locator(".lmx-snapshot")).to_contain_text("Remember this.")
    notebook.save()
    notebook.start_code("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    died = notebook.page.get_by_role("dialog").filter(has_text="appears to have died")
    expect(died).to_be_visible()
    died.get_by_role("button", name="Ok").click()
    expect(notebook.panel("Models").locator(".state")).to_have_text("disconnected")
    notebook.close_notebook()
    notebook.open(NAME)
    expect(notebook.outputs(SHOWN).locator(".lmx-snapshot")).to_contain_text("Remember this.")
    run_all(notebook)
    ask_echo(notebook, "And now?")
    notebook.forgive(NOT_FOUND)
    notebook.forgive(CANCELLED)
