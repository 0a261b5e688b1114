"""Test in a real kernel that the saved snapshots are updated with their panels."""

import base64
import re

import nbformat
import pytest
from nbclient import NotebookClient

from lmx_lab.panels.workbench import WIDGET_VIEW, StaticViews
from tests.support.kernels import without_ports

CELLS = (
    "import lmx_lab\nlab = lmx_lab.launch('echo', daemon=False, port=0)\nchat = lab.panel('chat')",
    "display(lab.panel('chat'), lab.panel('metrics'), lab.panel('models'))",
    "import time\n"
    "lab.workbench.submit(chat.do_send({'text': 'a first finding'})).result(30)\n"
    "while not [m for m in chat.messages if m['role'] == 'assistant']: time.sleep(0.05)",
    "lab.chat('hello from a cell')\nlab.unload()",
    "lab.stop()",
)


@pytest.mark.long
@pytest.mark.slow
def test_the_cell_that_displayed_panels_has_what_they_showed_last():
    # Run from top to bottom, as in JupyterLab or nbconvert.
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=120, config=without_ports()).execute()
    chat, metrics, models = (
        output["data"]["text/html"]
        for output in notebook.cells[1].outputs
        if "lmx-snapshot" in output.get("data", {}).get("text/html", "")
    )
    assert chat.count("a first finding") == 2, "the question and the echo"
    assert "<b>LMX Lab</b>: stopped" in models
    images = [
        base64.b64decode(image).decode() for image in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', metrics)
    ]
    headings = [re.findall('<text x="4" y="16"[^>]*>(.*?)</text>', image) for image in images]
    assert headings == [["Decode, tok/s"], ["Prefill, tok/s"], ["Requests"], ["Memory, GB"]]
    assert all("<svg xmlns=" in image and "<script" not in image for image in images)
    assert "Requests" in metrics


@pytest.fixture
def sent(monkeypatch):
    """The HTML of each snapshot that is displayed, and the options."""
    sent = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: sent.append((data["text/html"], options)))
    return sent


def show(views, content):
    views.show(({WIDGET_VIEW: {}, "text/html": "before"}, {}), content)


def test_a_snapshot_is_sent_again_only_after_a_change(sent):
    views, content = StaticViews(), ["before"]
    show(views, lambda: content[0])
    assert not views.is_due
    views.mark_changed()
    assert views.is_due
    views.refresh()
    assert len(sent) == 2, "its HTML is the same"
    content[0] = "two"
    views.mark_changed()
    assert not views.is_due, "less than ten seconds have passed"
    views.mark_changed(ended=True)
    assert views.is_due
    views.refresh()
    html, options = sent[-1]
    assert "two" in html
    assert re.search(r">as of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d</div>", html)
    assert options == {"raw": True, "display_id": sent[1][1]["display_id"], "update": True}


def test_an_error_in_a_snapshot_does_not_prevent_the_others(sent):
    views = StaticViews()
    show(views, lambda: 1 / 0)
    show(views, lambda: "after")
    views.mark_changed()
    views.refresh()
    assert "after" in sent[-1][0]


def test_only_the_newest_views_are_updated(sent):
    views = StaticViews(max_views=3)
    for _ in range(8):
        show(views, lambda: "after")
    sent.clear()
    views.refresh()
    assert len(sent) == 3
