"""Test views of panels: displayed twice, closed, in another tab, suspended, of a stopped server, and their messages."""

import httpx2
import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import (
    LAUNCH,
    LONG_ANSWER,
    MAX_UPDATES_PER_S,
    Tab,
    ask,
    model_button,
    model_row,
    panel_names,
    seconds,
    updates,
)

SHOWN = 1
"""Index of the cell that displays the panels."""


def test_a_second_tab_shows_the_same_and_works(panels, another_tab):
    chat = ask(panels, "What do both tabs show?")
    expect(chat.locator(".assistant").last).to_contain_text("40 tokens")
    panels.save()
    other = another_tab()
    other.open("panels.ipynb")
    expect(other.panel("Chat").locator(".user").last).to_contain_text("What do both tabs show?")
    assert other.panel("Chat").locator(".text").all_inner_texts() == chat.locator(".text").all_inner_texts()
    model_button(other, "Load tiny-two").click()
    for tab in (other, panels):
        expect(model_row(tab, "tiny-two")).to_contain_text("loaded")
        expect(model_row(tab, "tiny")).to_contain_text("on disk")
    expect(other.panel("Metrics").locator("canvas")).to_have_count(4)


def test_panels_have_titles_and_leave_no_cell_of_the_grid_empty(panels):
    grid = panels.outputs(SHOWN).locator(".widget-gridbox")
    places = {}
    for name in ("Models", "Metrics", "Chat", "Rerank"):
        expect(panels.panel(name).get_by_role("heading")).to_have_text(name)
        places[name] = panels.panel(name).bounding_box()
    box = grid.bounding_box()
    for left, right in (("Models", "Metrics"), ("Chat", "Rerank")):
        one, other = places[left], places[right]
        assert (one["y"], one["height"]) == pytest.approx((other["y"], other["height"]), abs=1)
        assert one["width"] + other["width"] == pytest.approx(box["width"], abs=20)
    charts = [chart.bounding_box() for chart in panels.panel("Metrics").locator("figure").all()]
    columns, rows = ({round(chart[side]) for chart in charts} for side in ("x", "y"))
    assert len(columns) * len(rows) == 4


def test_a_panel_shown_twice_is_the_same_panel_twice(panels):
    panels.add_cell("lab.panel('models')")
    panels.run(3)
    both = panels.panel("Models")
    expect(both).to_have_count(2)
    both.last.get_by_role("button", name="Load tiny-two").click()
    for view in both.all():
        expect(view.get_by_role("button", name="Unload tiny-two")).to_be_visible()
    panels.delete_cell(3)
    expect(panels.panel("Models")).to_have_count(1)


@pytest.mark.parametrize("end", ["closed", "cleared"])
def test_a_panel_that_is_gone_is_shown_again_with_the_current_state(panels, end):
    if end == "closed":
        panels.kernel("lab.panel('models').close()")
    else:
        panels.command("notebook:clear-all-cell-outputs")
    expect(panels.panel("Models")).to_have_count(0)
    panels.kernel("lab.load('tiny-two')")
    panels.run(SHOWN)
    expect(model_row(panels, "tiny-two")).to_contain_text("loaded")
    model_button(panels, "Unload tiny-two").click()
    expect(model_row(panels, "tiny-two")).to_contain_text("on disk")


def test_a_stopped_server_is_shown_and_then_the_next_one(panels):
    panels.kernel("lab.stop()")
    for name in ("Models", "Chat", "Metrics", "Rerank"):
        expect(panels.panel(name).locator(".state")).to_have_text("stopped")
    # One note for all panels.
    expect(panels.page.locator(".shared:visible")).to_have_count(1)
    expect(panels.panel("Models").locator(".shared")).to_contain_text("run the launch cell again")
    panels.kernel(LAUNCH.format(loop="thread"))
    for name in ("Chat", "Metrics", "Rerank"):
        expect(panels.panel(name).locator(".state")).to_be_hidden()
        expect(panels.panel(name).locator(".name")).to_have_text("tiny-bert" if name == "Rerank" else "tiny")
    expect(panels.page.locator(".shared:visible")).to_have_count(0)
    expect(model_row(panels, "tiny")).to_contain_text("loaded")
    chat = ask(panels, "Are you back?")
    expect(chat.locator(".assistant").last).to_contain_text("40 tokens")


def load_elsewhere(url):
    """Load a model as another client does."""
    assert httpx2.post(f"{url}/admin/models/load", json={"model": "tiny-two"}, timeout=30).status_code == 200


@pytest.mark.parametrize("without", [Tab.frozen, Tab.disconnected], ids=["a suspended tab", "a lost connection"])
def test_a_tab_shows_the_right_state_when_it_receives_messages_again(panels, without):
    url = panels.kernel("print(lab.url)")
    with without(panels):
        load_elsewhere(url)
    expect(model_row(panels, "tiny-two")).to_contain_text("loaded")
    expect(model_row(panels, "tiny")).to_contain_text("on disk")
    model_button(panels, "Unload tiny-two").click()
    expect(model_row(panels, "tiny-two")).to_contain_text("on disk")


def test_lost_state_is_requested_again(panels):
    url = panels.kernel("print(lab.url)")
    expect(model_row(panels, "tiny")).to_contain_text("loaded")
    with panels.deaf():
        load_elsewhere(url)
        panels.page.wait_for_timeout(1000)
        expect(model_row(panels, "tiny")).to_contain_text("loaded")
    expect(model_row(panels, "tiny-two")).to_contain_text("loaded")
    expect(model_row(panels, "tiny")).to_contain_text("on disk")


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
