"""Test the rerank panel: by mouse and by keyboard, long documents, errors, cancelling, and the focus."""

import json

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import DOCUMENTS, rank, send_ranking

LONG = "Bread is baked.\nright to left: \u202eabc\n" + "A long one. " * 100
SLOW = "import asyncio\nlab.workbench.backend.rerank = lambda *_, **__: asyncio.sleep(3600)"
"""A ranking then takes until it is cancelled."""


def column(rerank, name):
    at = ["rank", "score", "document", "index", "change"].index(name) + 1
    return rerank.locator(f"tbody td:nth-child({at})").all_inner_texts()


@pytest.mark.parametrize("way", ["mouse", "keyboard"])
def test_documents_are_ranked_and_sorted(panels, way):
    rerank = rank(panels, "\n".join(DOCUMENTS))
    expect(rerank.locator("tbody tr")).to_have_count(3)
    assert column(rerank, "rank") == ["1", "2", "3"]
    scores = [float(text) for text in column(rerank, "score")]
    assert scores == sorted(scores, reverse=True)
    head = rerank.get_by_role("columnheader", name="index")
    button = head.get_by_role("button")
    for order, indices in (("ascending", ["0", "1", "2"]), ("descending", ["2", "1", "0"])):
        if way == "mouse":
            button.click()
        else:
            button.focus()
            panels.page.keyboard.press("Enter")
        expect(head).to_have_attribute("aria-sort", order)
        assert column(rerank, "index") == indices
        expect(button).to_be_focused()


def test_ten_thousand_documents_are_shown_in_pages(panels):
    # As JSON in one line, because Playwright takes minutes to type ten thousand lines.
    rerank = rank(panels, json.dumps([f"the cat {number}" for number in range(10_000)]))
    expect(rerank).to_contain_text("of 10,000")
    expect(rerank.locator("tbody tr")).to_have_count(100)
    rerank.get_by_role("button", name="Next").click()
    expect(rerank).to_contain_text("200 of 10,000")
    assert column(rerank, "rank")[0] == "101"


def test_a_long_document_opens_and_closes(panels):
    panel = rank(panels, LONG)
    cell = panel.locator("td.document", has_text="A long one.")
    cell.get_by_role("button", name="more").focus()
    panels.page.keyboard.press("Enter")
    expect(cell.get_by_role("button", name="less")).to_be_focused()
    assert len(cell.locator("span").inner_text()) > 1000
    panels.page.keyboard.press("Enter")
    expect(cell.get_by_role("button", name="more")).to_have_attribute("aria-expanded", "false")
    assert len(cell.locator("span").inner_text()) <= 300
    assert "right to left: \\u202eabc" in panel.locator("tbody").inner_text()


def test_an_error_in_the_form_is_shown_until_the_next_ranking(panels):
    panel = panels.panel("Rerank")
    panel.get_by_label("Top").fill("0")
    send_ranking(panels, LONG, "q")
    expect(panel.get_by_role("alert")).to_contain_text("top_n is 0")
    panel.get_by_label("Top").fill("")
    rank(panels, LONG)
    expect(panel.get_by_role("alert")).to_be_hidden()


def test_a_long_ranking_can_be_cancelled(panels):
    panels.kernel(SLOW)
    panel = send_ranking(panels, LONG, "How long?")
    panel.get_by_role("button", name="Cancel").focus()
    expect(panel.get_by_text("Ranking…")).to_be_visible()
    panels.page.keyboard.press("Enter")
    expect(panel.get_by_role("alert")).to_contain_text("Cancelled")
    expect(panel.get_by_role("button", name="Rank", exact=True)).to_be_focused()
    panels.kernel("del lab.workbench.backend.rerank")


def test_replaced_rows_keep_the_focus_in_the_table(panels):
    panel = rank(panels, LONG)
    panel.get_by_role("button", name="more").focus()
    panels.kernel("lab.panel('rerank')._handle_custom_msg({'id': 'x', 'do': 'sort', 'column': 'score'}, [])")
    expect(panel.get_by_role("columnheader", name="score")).to_have_attribute("aria-sort", "descending")
    expect(panel.get_by_role("group", name="result")).to_be_focused()


def test_a_result_in_a_cell_is_a_table_that_sorts(panels):
    panels.add_cell("lab.rerank('salt', ['bread', '<i>salt</i>', 'sea'])")
    table = panels.run(3).locator("section.lmx")
    expect(table.locator("tbody tr")).to_have_count(3)
    expect(table.get_by_label("Query")).to_be_hidden()

    def is_sorted():
        table.get_by_role("button", name="document").click()
        return table.locator("td.document span").all_inner_texts() == ["<i>salt</i>", "bread", "sea"]

    # JupyterLab draws the table again when its snapshot is sent after the end of the cell.
    panels.wait(is_sorted, "the table is sorted")
    panels.delete_cell(3)
