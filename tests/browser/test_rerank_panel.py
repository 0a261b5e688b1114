"""Test the rerank panel by mouse and by keyboard."""

import json

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import DOCUMENTS, rank


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


def test_documents_with_html_and_script_are_shown_as_text(panels):
    documents = ["<script>alert(1)</script>", "<img src=x onerror=alert(2)>", "<b>the cat</b> &amp;"]
    rerank = rank(panels, json.dumps(documents))
    expect(rerank.locator("tbody tr")).to_have_count(3)
    expect(rerank.get_by_role("cell", name="<b>the cat</b> &amp;")).to_be_visible()
    assert sorted(text.strip() for text in column(rerank, "document")) == sorted(documents)
    expect(rerank.locator("tbody :is(script, img, b)")).to_have_count(0)


def test_ten_thousand_documents_are_shown_in_pages(panels):
    # As JSON in one line, because Playwright takes minutes to type ten thousand lines.
    rerank = rank(panels, json.dumps([f"the cat {number}" for number in range(10_000)]))
    expect(rerank).to_contain_text("of 10,000")
    expect(rerank.locator("tbody tr")).to_have_count(100)
    rerank.get_by_role("button", name="Next").click()
    expect(rerank).to_contain_text("200 of 10,000")
    assert column(rerank, "rank")[0] == "101"
