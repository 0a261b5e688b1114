"""Test views of panels: displayed twice, closed, in another tab, suspended, and of a stopped server."""

import httpx2
import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import LAUNCH, ask, model_button, model_row

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
    assert box is not None
    for left, right in (("Models", "Metrics"), ("Chat", "Rerank")):
        one, other = places[left], places[right]
        assert (one["y"], one["height"]) == pytest.approx((other["y"], other["height"]), abs=1)
        assert one["width"] + other["width"] == pytest.approx(box["width"], abs=20)
    charts = [chart.bounding_box() for chart in panels.panel("Metrics").locator("figure").all()]
    assert (
        len({round(chart["x"]) for chart in charts if chart}) * len({round(chart["y"]) for chart in charts if chart})
        == 4
    )


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


def test_a_closed_panel_is_shown_again_with_the_right_state(panels):
    panels.kernel("lab.panel('models').close()")
    expect(panels.panel("Models")).to_have_count(0)
    panels.kernel("lab.load('tiny-two')")
    panels.run(SHOWN)
    expect(model_row(panels, "tiny-two")).to_contain_text("loaded")
    model_button(panels, "Unload tiny-two").click()
    expect(model_row(panels, "tiny-two")).to_contain_text("on disk")


def test_a_cleared_output_is_restored_with_the_current_state(panels):
    panels.command("notebook:clear-all-cell-outputs")
    expect(panels.panel("Models")).to_have_count(0)
    panels.kernel("lab.load('tiny-two')")
    panels.run(SHOWN)
    expect(model_row(panels, "tiny-two")).to_contain_text("loaded")


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


def test_a_suspended_tab_shows_the_right_state_when_it_resumes(panels):
    url = panels.kernel("print(lab.url)")
    panels.freeze()
    assert httpx2.post(f"{url}/admin/models/load", json={"model": "tiny-two"}, timeout=30).status_code == 200
    panels.thaw()
    expect(model_row(panels, "tiny-two")).to_contain_text("loaded")
    expect(model_row(panels, "tiny")).to_contain_text("on disk")


def test_lost_state_is_requested_again(panels):
    url = panels.kernel("print(lab.url)")
    expect(model_row(panels, "tiny")).to_contain_text("loaded")
    with panels.deaf():
        assert httpx2.post(f"{url}/admin/models/load", json={"model": "tiny-two"}, timeout=30).status_code == 200
        panels.page.wait_for_timeout(1000)
        expect(model_row(panels, "tiny")).to_contain_text("loaded")
    expect(model_row(panels, "tiny-two")).to_contain_text("loaded")
    expect(model_row(panels, "tiny")).to_contain_text("on disk")


def test_a_browser_shows_the_right_state_after_a_lost_connection(panels):
    url = panels.kernel("print(lab.url)")
    panels.disconnect()
    assert httpx2.post(f"{url}/admin/models/load", json={"model": "tiny-two"}, timeout=30).status_code == 200
    panels.reconnect()
    expect(model_row(panels, "tiny-two")).to_contain_text("loaded")
    model_button(panels, "Unload tiny-two").click()
    expect(model_row(panels, "tiny-two")).to_contain_text("on disk")
