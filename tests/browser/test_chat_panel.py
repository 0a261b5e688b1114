"""Test the chat panel by mouse and by keyboard."""

from __future__ import annotations

from playwright.sync_api import Locator, expect

from tests.browser.jupyterlab import Tab

LONG = 20_000
"""Tokens of an answer that is still running when a test checks it."""


def ask(tab: Tab, text: str, *, max_tokens: int = 40) -> Locator:
    """After the end of the previous answer, type and send a message. Returns the panel when it displays the message."""
    chat = tab.panel("Chat")
    expect(chat.get_by_role("button", name="Send")).to_be_visible()
    count = chat.locator(".user").count()
    knobs = chat.locator("details", has_text="sampling")
    if not knobs.evaluate("node => node.open"):
        knobs.locator("summary").click()
    chat.get_by_label("max_tokens").fill(str(max_tokens))
    chat.get_by_label("message").focus()
    tab.page.keyboard.type(text)
    tab.page.keyboard.press("Enter")
    expect(chat.locator(".user")).to_have_count(count + 1)
    return chat


def test_an_answer_streams_and_ends_with_its_cost(panels: Tab) -> None:
    chat = ask(panels, "Tell me a story.", max_tokens=LONG)
    expect(chat.get_by_role("button", name="Stop")).to_be_visible()
    answer = chat.locator(".assistant .text:not(.dim)").last
    panels.wait(answer.inner_text, "the answer begins")
    before = answer.inner_text()
    panels.wait(lambda: len(answer.inner_text()) > len(before), "it grows")
    panels.page.keyboard.press("Escape")
    expect(chat.get_by_role("button", name="Send")).to_be_visible()
    ask(panels, "Another one.")
    expect(chat.locator(".assistant").last).to_contain_text("40 tokens")
    expect(chat.locator(".assistant").last).to_contain_text("tok/s")
    expect(chat.get_by_label("message")).to_be_focused()


def test_an_answer_is_stopped_by_mouse_and_the_transcript_cleared(panels: Tab) -> None:
    chat = ask(panels, "Tell me a story.", max_tokens=LONG)
    panels.wait(chat.locator(".assistant .text:not(.dim)").last.inner_text, "the answer begins")
    chat.get_by_role("button", name="Stop").click()
    expect(chat.locator(".assistant").last).to_contain_text("stopped")
    panels.wait(lambda: panels.kernel("print(lab.engine.snapshot.active_requests)") == "0", "its slot is free")
    chat.get_by_role("button", name="Clear").click()
    expect(chat.locator(".assistant")).to_have_count(0)


def test_html_in_a_message_is_shown_as_text(panels: Tab) -> None:
    text = "<img src=x onerror=alert(1)><script>alert(2)</script> **&amp;**"
    chat = ask(panels, text)
    expect(chat.locator(".user .text:not(.dim)").last).to_have_text(text)
    expect(chat.locator("img, script")).to_have_count(0)
    expect(chat.get_by_role("button", name="Send")).to_be_visible()
