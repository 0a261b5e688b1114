"""The reader of the pages notices what a reader would."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.docs.pages import README, Block, anchors, blocks, links, rows
from tests.docs.reading import Reader


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with Reader(tmp_path, {}) as reader:
        yield reader


def bash(text: str) -> Block:
    return Block(page=README, line=1, language="bash", text=text, not_run=None)


def test_a_command_that_fails_fails_its_block(reader: Reader) -> None:
    assert reader.do(bash("echo fine")) == "fine\n"
    with pytest.raises(AssertionError, match="exit status 3"):
        reader.do(bash("(exit 3)\necho went on"))


def test_an_answer_that_is_an_error_fails_its_block(reader: Reader) -> None:
    # The handler knows no method: it answers 501.
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(AssertionError, match="exit status 22"):
            reader.do(bash(f"curl http://127.0.0.1:{server.server_port}/"))
        thread.join()


def test_an_address_needs_a_server_that_the_page_has_started(reader: Reader) -> None:
    with pytest.raises(AssertionError, match="no server yet"):
        reader.do(bash("curl http://127.0.0.1:8400/readyz"))


def test_a_server_that_does_not_start_fails_its_block(reader: Reader) -> None:
    with pytest.raises(AssertionError, match="slots"):
        reader.do(bash("lmx-lab serve --slots 0"))


def test_a_page_is_taken_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page, of *mine*\n\n<!-- not run: it would take a day -->\n```bash\nsleep 86400\n```\n"
        "![a picture](a.png) and [a page](other.md#there)\n\n```python\n[no](link)\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n"
    )
    assert [(block.language, block.line, block.not_run) for block in blocks(page)] == [
        ("bash", 4, "it would take a day"),
        ("python", 9, None),
    ]
    assert links(page) == ["a.png", "other.md#there"]
    assert anchors(page) == {"a-page-of-mine"}
    assert list(rows(page, "a")) == [{"a": "1", "b": "2"}]
