"""Test the size of the panels' code and the rate of messages. All browser tests check that no other host is used."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import Tab, seconds, updates
from tests.browser.test_chat_panel import LONG, ask
from tests.browser.test_models_panel import button, row

MAX_CODE_BYTES = 84 * 1024
MAX_UPDATES_PER_S = 4


def names(tab: Tab) -> dict[str, str]:
    """Return the names of the panels by the ids of their comms."""
    printed = tab.kernel("print(*(f'{panel.comm.comm_id}={name}' for name, panel in lab.workbench.panels.items()))")
    return dict(pair.split("=") for pair in printed.split())


def test_the_code_of_all_panels_is_small(panels: Tab) -> None:
    code = int(panels.kernel("print(sum(len(panel._esm.encode()) for panel in lab.workbench.panels.values()))"))
    assert set(names(panels).values()) >= {"models", "metrics", "chat", "rerank"}
    assert 30_000 < code <= MAX_CODE_BYTES


@pytest.mark.long
def test_no_panel_sends_more_than_four_messages_per_second(panels: Tab) -> None:
    with panels.watched() as messages:
        chat = ask(panels, "Tell me a story.", max_tokens=LONG)
        button(panels, "Load tiny-two").click()
        panels.page.wait_for_timeout(2000)
        chat.get_by_role("button", name="Stop").click()
        expect(chat.get_by_role("button", name="Send")).to_be_visible()
        expect(row(panels, "tiny-two")).to_contain_text("loaded")
    counted = {name: updates(messages)[comm] for comm, name in names(panels).items()}
    assert counted["chat"] >= 2
    assert counted["metrics"] >= 2
    # One more for a frame that was due when the measurement started, and one for a comparison.
    assert {name: count for name, count in counted.items() if count > MAX_UPDATES_PER_S * seconds(messages) + 2} == {}
