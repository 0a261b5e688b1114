"""Test the events panel in a browser, with the events of a scripted daemon."""

import json

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import (
    ALL_EVENTS,
    EVENT_IMPORTS,
    MAX_UPDATES_PER_S,
    NEXT_FRAMES,
    RESET_EVENTS,
    SCRIPTED_EVENTS,
    SLEEP,
    check_readable,
    seconds,
    sleeping,
    updates,
)

# The rows that are visible, without those that are drawn beyond the edges.
VISIBLE = """(box) => {
    const {top, bottom} = box.getBoundingClientRect();
    return [...box.querySelectorAll("tbody:nth-of-type(2) tr")].filter((row) => {
        const at = row.getBoundingClientRect();
        return at.top > top + 26 && at.bottom < bottom;
    }).map((row) => row.cells[3].textContent);
}"""


@pytest.fixture(scope="module")
def notebook(tab, jupyterlab):
    jupyterlab.write("events.ipynb", [SCRIPTED_EVENTS, "compose_panels(bench, ['events'])", SLEEP])
    tab.open("events.ipynb")
    tab.run(0)
    tab.run(1)
    tab.kernel(EVENT_IMPORTS)
    yield tab
    tab.open("events.ipynb")
    tab.close_notebook()


@pytest.fixture
def events(notebook):
    """A notebook with the panel, without rows; its daemon has not sent events yet."""
    notebook.kernel(RESET_EVENTS)
    expect(rows(notebook)).to_have_count(0)
    return notebook


def rows(tab):
    """Return the rows that are elements of the page."""
    return tab.panel("Events").locator(".rows tbody:nth-of-type(2) tr")


@pytest.mark.long
def test_ten_thousand_events_per_second_do_not_overload_the_browser(events):
    panel = events.panel("Events")
    comm = events.kernel("print(panel.comm.comm_id)")
    events.kernel("daemon = Flood(10_000)\nbench.follow_events(daemon)")
    try:
        expect(panel).to_contain_text("older rows were removed")
        with events.watched() as messages:
            events.page.wait_for_timeout(1000)
            # Scroll away from the newest rows; the visible rows are removed at once.
            panel.get_by_label("rows").evaluate("box => { box.scrollTop = 3000; }")
            expect(panel.get_by_label("follow")).not_to_be_checked()
            events.page.wait_for_timeout(2000)
        panel.get_by_label("search text").fill("all of")
        expect(rows(events).last).to_contain_text("message.done")
        expect(rows(events).filter(has_text="turn.token")).to_have_count(0)
        assert rows(events).count() < 60
        sent = int(events.kernel("print(daemon.sent)"))
        events.wait(lambda: int(events.kernel("print(daemon.sent)")) > sent, "events were sent all the time")
    finally:
        events.kernel("bench.follow_events(ScriptedDaemon())")
    own = [each for each in messages if each[1]["content"].get("comm_id") == comm]
    assert updates(messages)[comm] >= 2
    # One more for a frame that was due when the measurement started, two for requests by scrolling, and two for replies
    # to comparisons.
    assert len(own) <= MAX_UPDATES_PER_S * seconds(messages) + 5


def test_a_decision_is_sent_while_a_cell_sleeps(events):
    panel = events.panel("Events")
    # From a thread, because the cell blocks the kernel's loop.
    events.kernel(
        "import threading\ncalls = log.permission_request(), log.permission_request('per-2', tool='other')\n"
        "threading.Timer(1, give, calls).start()"
    )
    with sleeping(events):
        question = panel.get_by_role("group", name="decision about shell")
        expect(question).to_contain_text('"command": "ls"')
        question.get_by_role("button", name="Allow in this session").click()
        expect(question).to_have_count(0)
        other = panel.get_by_role("group", name="decision about other")
        other.get_by_role("button", name="Deny").focus()
        events.page.keyboard.press("Enter")
        expect(other).to_have_count(0)
        expect(panel.get_by_label("rows")).to_be_focused()
    assert json.loads(events.kernel("import json; print(json.dumps(daemon.calls))")) == [
        ["decide", "per-1", "allow", "session"],
        ["decide", "per-2", "deny", "once"],
    ]


def test_rows_in_view_stay_while_others_arrive(events):
    panel = events.panel("Events")
    box = panel.get_by_label("rows")
    events.kernel("give(*(log.event('x.n', f'number {n:04}') for n in range(1000)))")
    expect(rows(events).last).to_contain_text("number 0999")
    assert box.evaluate(VISIBLE)[-1] == '"number 0999"'
    box.hover()
    events.page.mouse.wheel(0, -26 * 500)

    def in_the_middle():
        seen = box.evaluate(VISIBLE)
        return seen if len(seen) > 8 and all("number 04" in text for text in seen) else []

    read = events.wait(in_the_middle, "rows in the middle are there")
    assert read == sorted(read)
    # The 200 oldest are removed.
    events.kernel("give(*(log.event('x.n', f'later {n}') for n in range(4200)))")
    expect(panel).to_contain_text("older rows were removed: 200")
    events.page.evaluate(NEXT_FRAMES)
    assert box.evaluate(VISIBLE) == read
    panel.get_by_label("follow").check()
    expect(rows(events).last).to_contain_text("later 4199")
    assert box.evaluate(VISIBLE)[-1] == '"later 4199"'


def test_an_event_is_shown_and_copied_as_text(events):
    panel = events.panel("Events")
    events.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    events.kernel(f"give(log.created(title={evil!r}), log.message({evil!r}), log.permission_request(tool={evil!r}))")
    expect(panel.locator("img, script")).to_have_count(0)
    row = rows(events).filter(has_text="message.done")
    expect(row).to_contain_text(evil)
    row.get_by_role("button").click()
    expect(panel.get_by_label("event as JSON", exact=True)).to_contain_text('"role": "assistant"')
    events.page.evaluate("navigator.clipboard.writeText('')")
    panel.get_by_role("button", name="copy event as JSON").click()
    copied = json.loads(events.wait(lambda: events.page.evaluate("navigator.clipboard.readText()"), "it is copied"))
    events.page.context.clear_permissions()
    assert copied["data"]["message"]["content"] == evil
    panel.get_by_role("button", name="close").click()
    expect(panel.locator(".detail")).to_be_hidden()


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_a_session_can_be_followed_and_stopped_with_enough_contrast(events, theme):
    panel = events.panel("Events")
    events.kernel(ALL_EVENTS)
    panel.get_by_label("session", exact=True).select_option("ses-1")
    expect(panel.locator(".output .text").last).to_have_text("It is sunny, and warm.")
    expect(rows(events).filter(has_text="daemon.unheard")).to_have_count(0)
    expect(rows(events).filter(has_text="events are missing here")).to_have_count(1)
    expect(panel.get_by_role("button", name="turn.token \N{MULTIPLICATION SIGN}20")).to_be_visible()
    rows(events).last.get_by_role("button").click()
    check_readable(events, "Events", theme, lambda: None)
    panel.get_by_role("button", name="Stop").click()
    events.wait(lambda: events.kernel("print(daemon.calls)") == "[('cancel', 'ses-1')]", "the turn is cancelled")
    panel.get_by_role("button", name="close").click()


# The last test, because it restarts the kernel.
def test_a_panel_without_a_kernel_does_not_claim_a_live_connection(events):
    connection = events.panel("Events").locator(".head .pill:not(.state)")
    expect(connection).to_have_text("live")
    events.restart()
    expect(events.panel("Events").locator(".state")).to_have_text("disconnected")
    expect(connection).to_be_hidden()
    events.run(0)  # so that the new kernel has answered before it is closed
