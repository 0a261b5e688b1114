"""Test the rerank panel: long documents, errors, cancelling, and the focus."""

from playwright.sync_api import expect

DOCUMENTS = "Bread is baked.\nright to left: \u202eabc\n" + "A long one. " * 100
SLOW = "import asyncio\nlab.workbench.backend.rerank = lambda *_, **__: asyncio.sleep(3600)"
"""A ranking then takes until it is cancelled."""


def send(tab, documents, query):
    """Fill in the form, send it by keyboard, and return the panel."""
    panel = tab.panel("Rerank")
    panel.get_by_label("Query").fill(query)
    panel.get_by_label("Documents").fill(documents)
    tab.page.keyboard.press("Control+Enter")
    return panel


def rank(tab, query):
    """Rank documents, and wait for the result. Each test has another query."""
    panel = send(tab, DOCUMENTS, query)
    expect(panel.get_by_role("status").filter(has_text=query)).to_be_visible()
    return panel


def test_a_long_document_opens_and_closes(panels):
    panel = rank(panels, "What is long?")
    cell = panel.locator("td.document", has_text="A long one.")
    cell.get_by_role("button", name="more").focus()
    panels.page.keyboard.press("Enter")
    expect(cell.get_by_role("button", name="less")).to_be_focused()
    assert len(cell.locator("span").inner_text()) > 1000
    panels.page.keyboard.press("Enter")
    expect(cell.get_by_role("button", name="more")).to_have_attribute("aria-expanded", "false")
    assert len(cell.locator("span").inner_text()) <= 300
    assert "right to left: \\u202eabc" in panel.locator("tbody").inner_text()


def test_errors_in_the_form_are_shown(panels):
    panel = send(panels, "", "q")
    expect(panel.get_by_role("alert")).to_contain_text("no documents")
    send(panels, "[1, 2]", "q")
    expect(panel.get_by_role("alert")).to_contain_text("not a list of texts")
    panel.get_by_label("Top").fill("0")
    send(panels, DOCUMENTS, "q")
    expect(panel.get_by_role("alert")).to_contain_text("top_n is 0")
    panel.get_by_label("Top").fill("")
    rank(panels, "What is right?")
    expect(panel.get_by_role("alert")).to_be_hidden()


def test_a_long_ranking_can_be_cancelled(panels):
    panels.kernel(SLOW)
    panel = send(panels, DOCUMENTS, "How long?")
    panel.get_by_role("button", name="Cancel").focus()
    expect(panel.get_by_text("Ranking…")).to_be_visible()
    panels.page.keyboard.press("Enter")
    expect(panel.get_by_role("alert")).to_contain_text("Cancelled")
    expect(panel.get_by_role("button", name="Rank", exact=True)).to_be_focused()
    panels.kernel("del lab.workbench.backend.rerank")


def test_replaced_rows_keep_the_focus_in_the_table(panels):
    panel = rank(panels, "Where was I?")
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
