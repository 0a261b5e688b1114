"""Test the chat panel by mouse and by keyboard."""

from playwright.sync_api import expect

from tests.browser.jupyterlab import LONG_ANSWER, ask


def test_an_answer_streams_and_ends_with_its_cost(panels):
    chat = ask(panels, "Tell me a story.", max_tokens=LONG_ANSWER)
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


def test_an_answer_is_stopped_by_mouse_and_the_transcript_cleared(panels):
    chat = ask(panels, "Tell me a story.", max_tokens=LONG_ANSWER)
    panels.wait(chat.locator(".assistant .text:not(.dim)").last.inner_text, "the answer begins")
    chat.get_by_role("button", name="Stop").click()
    expect(chat.locator(".assistant").last).to_contain_text("stopped")
    panels.wait(lambda: panels.kernel("print(lab.server.engine.snapshot.active_requests)") == "0", "its slot is free")
    chat.get_by_role("button", name="Clear").click()
    expect(chat.locator(".assistant")).to_have_count(0)
