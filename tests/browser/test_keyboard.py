"""Test that all controls of the panels can be reached, recognized and used with the keyboard alone."""

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import ALL_EVENTS, EVENT_IMPORTS, RESET_EVENTS, SCRIPTED_EVENTS, ask_echo, tab_through


@pytest.fixture(scope="module")
def all_panels(tab, jupyterlab):
    """A notebook with all panels, with the events of a scripted daemon, a conversation and a ranking."""
    jupyterlab.write(
        "keyboard.ipynb",
        [
            "import lmx_lab\nlab = lmx_lab.launch('echo', port=0)",
            SCRIPTED_EVENTS + "bench = lab.workbench; bench.follow_events(daemon)",
            "lab.panel('models', 'metrics', 'chat', 'rerank', 'events')",
        ],
    )
    tab.open("keyboard.ipynb")
    for cell in range(3):
        tab.run(cell)
    tab.kernel(EVENT_IMPORTS + RESET_EVENTS + ALL_EVENTS)
    ask_echo(tab, "What can be reached?")
    yield tab
    tab.open("keyboard.ipynb")
    tab.close_notebook()


@pytest.mark.parametrize("name", ["Models", "Metrics", "Chat", "Rerank", "Events"])
def test_tab_reaches_every_control_in_order_and_each_has_a_name(all_panels, name):
    panel = all_panels.panel(name)
    for fold in panel.locator("summary:visible").all():
        if not fold.evaluate("node => node.parentElement.open"):
            fold.press("Enter")
    assert tab_through(all_panels.page, panel) >= 3


def test_a_question_is_edited_saved_and_loaded_by_keyboard(all_panels):
    page, chat = all_panels.page, all_panels.panel("Chat")
    answers = chat.locator(".assistant .text:not(.dim)")
    ask_echo(all_panels, "Second.")
    chat.locator(".user").first.get_by_role("button", name="edit").press("Enter")
    box = chat.get_by_label("message")
    expect(box).to_be_focused()
    expect(box).to_have_value("What can be reached?")
    page.keyboard.press("Escape")
    expect(box).to_have_value("")
    chat.locator(".user").first.get_by_role("button", name="edit").press("Enter")
    expect(chat.get_by_text("Sending replaces the marked question")).to_be_visible()
    box.fill("Edited.")
    page.keyboard.press("Enter")
    expect(answers).to_have_text(["Edited."])
    with page.expect_download() as download:
        chat.get_by_role("button", name="Save").press("Enter")
    saved = download.value.path()
    with page.expect_download() as download:
        chat.get_by_role("button", name="Export").press("Enter")
    assert download.value.suggested_filename.endswith(".md")
    assert "## You\n\nEdited." in download.value.path().read_text(encoding="utf-8")
    chat.get_by_role("button", name="Clear").press("Enter")
    expect(chat.locator(".user")).to_have_count(0)
    expect(chat.get_by_text("No messages yet")).to_be_visible()
    with page.expect_file_chooser() as chooser:
        chat.get_by_role("button", name="Open").press("Enter")
    chooser.value.set_files(saved)
    expect(answers).to_have_text(["Edited."])
    ask_echo(all_panels, "And now?")
