"""The code of README and of the pages in ``docs`` does what it says: every block, in order, with real parts.

A block of Python is a cell of one kernel for the whole page, or a program of its own if its first line names a file.
A block of bash that starts a server goes on until the page ends. What is changed in them is in ``reading``:
``STANDS_FOR`` and ``SHORTER``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmx_lab.values.models import ModelEntry
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.docs.reading import Reader
from tests.tiny import write_tiny_llama

pytestmark = pytest.mark.long

ELSEWHERE = {"clients.md": "its clients are other projects', some in an environment of their own: tests/other_clients"}
"""Pages whose code runs in tests of their own, and why."""
RUN = [page for page in PAGES if page.name not in ELSEWHERE and any(not block.not_run for block in blocks(page))]
LANGUAGES = {"bash", "python", "text"}
"""``text`` is what a program or a model says."""
MOST_NOT_RUN = 3


@pytest.fixture(scope="session")
def models(smollm2: ModelEntry, minilm: ModelEntry, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    tiny = tmp_path_factory.mktemp("docs") / "tiny"
    write_tiny_llama(tiny, smollm2.path, seed=0, context=2048)
    return {smollm2.id: smollm2.path, minilm.id: minilm.path, "tiny": tiny}


@pytest.mark.timeout(900)  # A whole page, perhaps beside many other programs.
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, models: Mapping[str, Path], tmp_path: Path) -> None:
    with Reader(tmp_path, models) as reader:
        for block in shown(page):
            try:
                reader.do(block)
            except AssertionError as exc:
                raise AssertionError(f"{block.place} does not do what it shows: {exc}") from exc


def shown(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.not_run is None and block.language != "text"]


def test_what_does_not_run_has_a_reason_and_is_little() -> None:
    left_out = [block for page in RUN for block in blocks(page) if block.not_run is not None]
    assert all(len(block.not_run or "") > 10 for block in left_out)
    assert len(left_out) <= MOST_NOT_RUN, [block.place for block in left_out]
    written = sum(page.read_text(encoding="utf-8").count("<!-- not run") for page in RUN)
    assert written == len(left_out), "a comment stands right before its block, and says why after a colon"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_it_is(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
