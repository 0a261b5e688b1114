"""The rerank panel, by mouse and by keyboard."""

from __future__ import annotations

from playwright.sync_api import Locator, expect

from tests.browser.jupyterlab import Tab

DOCUMENTS = (
    """Bread is baked.
Sea water is <b>salty</b>.<script>alert(1)</script>
right to left: \u202eabc
"""
    + "A long one. " * 100
)


def rank(tab: Tab, documents: str, query: str = "How salty is the sea?") -> Locator:
    """Fill the form in and send it by keyboard; returns the panel."""
    panel = tab.panel("Rerank")
    panel.get_by_label("Query").fill(query)
    # As if pasted: thousands of lines typed would take Chromium minutes.
    panel.get_by_label("Documents").evaluate("(area, text) => { area.value = text; area.focus(); }", documents)
    tab.page.keyboard.press("Control+Enter")
    return panel


def ranks(panel: Locator) -> list[str]:
    return panel.locator("tbody tr td:first-child").all_inner_texts()


def test_documents_are_ranked_and_shown_as_text(panels: Tab) -> None:
    panel = rank(panels, DOCUMENTS)
    expect(panel.locator("tbody tr")).to_have_count(4)
    text = panel.locator("tbody").inner_text()
    assert "Sea water is <b>salty</b>.<script>alert(1)</script>" in text
    assert "right to left: \\u202eabc" in text
    expect(panel.locator("tbody b, tbody script")).to_have_count(0)
    expect(panel.get_by_text("4 documents by cosine, tiny-bert")).to_be_visible()
    expect(panel.get_by_label("Documents")).to_be_focused()


def test_columns_sort_by_keyboard_and_keep_the_focus(panels: Tab) -> None:
    panel = rank(panels, DOCUMENTS)
    expect(panel.locator("tbody tr")).to_have_count(4)
    head = panel.get_by_role("columnheader", name="index")
    head.get_by_role("button").focus()
    for key, order in (("Enter", "ascending"), ("Space", "descending")):
        panels.page.keyboard.press(key)
        expect(head).to_have_attribute("aria-sort", order)
        indices = [int(text) for text in panel.locator("tbody tr td:nth-child(4)").all_inner_texts()]
        assert indices == sorted(indices, reverse=order == "descending")
        expect(head.get_by_role("button")).to_be_focused()
    panel.get_by_role("button", name="rank", exact=True).click()
    expect(panel.get_by_role("columnheader", name="rank")).to_have_attribute("aria-sort", "ascending")
    assert ranks(panel) == ["1", "2", "3", "4"]


def test_a_long_document_opens_and_closes(panels: Tab) -> None:
    panel = rank(panels, DOCUMENTS)
    cell = panel.locator("td.document", has_text="A long one.")
    cell.get_by_role("button", name="more").focus()
    panels.page.keyboard.press("Enter")
    expect(cell.get_by_role("button", name="less")).to_be_focused()
    assert len(cell.locator("span").inner_text()) > 1000
    panels.page.keyboard.press("Enter")
    expect(cell.get_by_role("button", name="more")).to_have_attribute("aria-expanded", "false")
    assert len(cell.locator("span").inner_text()) <= 300


def test_what_is_wrong_with_the_form_is_said(panels: Tab) -> None:
    panel = rank(panels, "")
    expect(panel.get_by_role("alert")).to_contain_text("no documents")
    panel = rank(panels, "[1, 2]")
    expect(panel.get_by_role("alert")).to_contain_text("no list of texts")
    panel.get_by_label("Top").fill("0")
    rank(panels, DOCUMENTS)
    expect(panel.get_by_role("alert")).to_contain_text("top_n is 0")
    panel.get_by_label("Top").fill("")
    rank(panels, DOCUMENTS)
    expect(panel.get_by_role("alert")).to_be_hidden()


def test_a_long_ranking_can_be_given_up(panels: Tab) -> None:
    panel = rank(panels, "\n".join(f"{number} " + "some words " * 30 for number in range(5000)))
    panel.get_by_role("button", name="Cancel").focus()
    panels.page.keyboard.press("Enter")
    expect(panel.get_by_role("alert")).to_contain_text("Cancelled")
    expect(panel.get_by_role("button", name="Rank", exact=True)).to_be_focused()


def test_ten_thousand_documents_are_paged(panels: Tab) -> None:
    panel = rank(panels, "\n".join(f"document {number}" for number in range(10_000)))
    panels.wait(lambda: panel.get_by_text("1 to 100 of 10,000").count(), "ten thousand are ranked")
    panel.get_by_role("button", name="Next").click()
    expect(panel.get_by_text("101 to 200 of 10,000")).to_be_visible()
    expect(panel.locator("tbody tr")).to_have_count(100)
    assert ranks(panel)[0] == "101"


def test_a_result_in_a_cell_is_a_table_that_sorts(panels: Tab) -> None:
    panels.add_cell("lab.rerank('salt', ['bread', '<i>salt</i>', 'sea'])")
    table = panels.run(3).locator("section.lmx")
    expect(table.locator("tbody tr")).to_have_count(3)
    expect(table.get_by_label("Query")).to_be_hidden()
    table.get_by_role("button", name="document").click()
    panels.wait(
        lambda: table.locator("td.document").all_inner_texts() == ["<i>salt</i>", "bread", "sea"], "they are sorted"
    )
    panels.delete_cell(3)
