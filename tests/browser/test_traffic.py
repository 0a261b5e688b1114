"""Test the size of the panels' code and the rate of messages. All browser tests check that no other host is used."""

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import (
    LONG_ANSWER,
    MAX_UPDATES_PER_S,
    ask,
    model_button,
    model_row,
    panel_names,
    seconds,
    updates,
)

MAX_CODE_BYTES = 84 * 1024


def test_the_code_of_all_panels_is_small(panels):
    code = int(panels.kernel("print(sum(len(panel._esm.encode()) for panel in lab.workbench.panels.values()))"))
    assert set(panel_names(panels).values()) >= {"models", "metrics", "chat", "rerank"}
    assert 30_000 < code <= MAX_CODE_BYTES


@pytest.mark.long
def test_no_panel_sends_more_than_four_messages_per_second(panels):
    with panels.watched() as messages:
        chat = ask(panels, "Tell me a story.", max_tokens=LONG_ANSWER)
        model_button(panels, "Load tiny-two").click()
        panels.page.wait_for_timeout(2000)
        chat.get_by_role("button", name="Stop").click()
        expect(chat.get_by_role("button", name="Send")).to_be_visible()
        expect(model_row(panels, "tiny-two")).to_contain_text("loaded")
    counted = {name: updates(messages)[comm] for comm, name in panel_names(panels).items()}
    assert counted["chat"] >= 2
    assert counted["metrics"] >= 2
    # One more for a frame that was due when the measurement started, and one for a comparison.
    assert {name: count for name, count in counted.items() if count > MAX_UPDATES_PER_S * seconds(messages) + 2} == {}
