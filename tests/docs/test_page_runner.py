"""Test that the page runner detects broken examples, and that pages are parsed correctly."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.docs.page_runner import PageRunner
from tests.support.docs import README, Block, anchors, code_blocks, links, table_rows


@pytest.fixture
def runner(tmp_path):
    with PageRunner(tmp_path, {}) as runner:
        yield runner


def bash(text):
    return Block(page=README, line=1, language="bash", text=text, not_run=None)


@pytest.mark.slow
def test_a_failing_command_fails_its_block(runner):
    assert runner.run(bash("echo fine")) == "fine\n"
    with pytest.raises(AssertionError, match="exit status 3"):
        runner.run(bash("(exit 3)\necho continued"))


def test_an_error_response_fails_its_block(runner):
    # The handler implements no method, so it answers 501.
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(AssertionError, match="exit status 22"):
            runner.run(bash(f"curl http://127.0.0.1:{server.server_port}/"))
        thread.join()


def test_an_address_needs_a_server_that_the_page_has_started(runner):
    with pytest.raises(AssertionError, match="has not started a server"):
        runner.run(bash("curl http://127.0.0.1:8400/readyz"))


@pytest.mark.slow
def test_a_server_that_does_not_start_fails_its_block(runner):
    with pytest.raises(AssertionError, match="slots"):
        runner.run(bash("lmx-lab serve --slots 0"))


def test_blocks_links_anchors_and_tables_of_a_page_are_parsed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page, of *mine*\n\n<!-- not run: it would take a day -->\n```bash\nsleep 86400\n```\n"
        "![a picture](a.png) and [a page](other.md#there)\n\n```python\n[no](link)\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n"
    )
    assert [(block.language, block.line, block.not_run) for block in code_blocks(page)] == [
        ("bash", 4, "it would take a day"),
        ("python", 9, None),
    ]
    assert links(page) == ["a.png", "other.md#there"]
    assert anchors(page) == {"a-page-of-mine"}
    assert list(table_rows(page, "a")) == [{"a": "1", "b": "2"}]
