"""Test in a kernel how the answers of a lab are displayed."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    pass

HOSTILE = "<img src=x onerror=alert(1)> and some words"


@pytest.mark.long
def test_a_stream_displays_its_text_and_then_the_reply(fresh_notebook):
    fresh_notebook.run("import lmx_lab; lab = lmx_lab.launch('echo', port=0, echo_tokens_per_s=100)")
    fresh_notebook.start(f"lab.chat({HOSTILE!r}, stream=True, logprobs=2)")
    shown = fresh_notebook.read().shown
    assert len(shown) >= 3
    assert all("<img" not in output.get("text/html", "") for output in shown)
    assert "white-space: pre-wrap" in shown[0]["text/html"]
    assert "text/markdown" in shown[-1]
    assert fresh_notebook.run("print(_.reply.text)") == HOSTILE
    fresh_notebook.start("_.reply.logprobs")
    assert "<table>" in fresh_notebook.read().shown[-1]["text/html"]
    fresh_notebook.start("stream = lab.chat('word ' * 400, stream=True); stream.show(); print(type(stream.reply))")
    assert "Reply" in fresh_notebook.read().text


def test_a_slow_launch_shows_where_the_time_went(fresh_notebook):
    fresh_notebook.start(
        "import lmx_lab.notebook.load_progress as progress; progress.LOAD_SHOWN_S = 60; "
        "from lmx_lab.notebook import launcher; launcher.SLOW_S = launcher.SHOWN_S = 0"
    )
    fresh_notebook.read()
    fresh_notebook.start("lab = lmx_lab.launch('echo', port=0)")
    (shown,) = fresh_notebook.read().shown
    assert "The launch took" in shown["text/plain"]
    assert "the server" in shown["text/plain"]
    assert "echo" in shown["text/plain"]
