"""Test that the notebooks form a course: each has a question, its answer, a link to the next one, and a page."""

import os
import re
import subprocess
import sys
from itertools import pairwise

import nbformat
import pytest

from tests.support.docs import NOTEBOOK_FOLDER, NOTEBOOKS, ROOT

pytestmark = pytest.mark.long

GALLERY = ROOT / "tools" / "gallery.py"


def cells(path):
    return [(cell.cell_type, cell.source) for cell in nbformat.read(path, as_version=4).cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_a_question_and_ends_with_the_answer(path):
    first, *_, printed, last = cells(path)
    title, blank, question = first[1].splitlines()[:3]
    assert re.fullmatch(rf"# {path.stem[:2]} · \w.*", title)
    assert blank == ""
    assert re.fullmatch(r"\*[A-Z].+\?\*", question)
    assert (printed[0], last[0]) == ("code", "markdown")
    assert "print(" in printed[1]
    assert last[1].startswith("**Answer:** ")


@pytest.mark.parametrize(("path", "following"), list(pairwise(NOTEBOOKS)), ids=lambda path: path.stem)
def test_a_notebook_names_the_next_one_by_its_title(path, following):
    title = cells(following)[0][1].splitlines()[0].removeprefix("# ")
    assert f"\n\nNext: [{title}]({following.name})" in cells(path)[-1][1]


def test_links_between_notebooks_lead_somewhere():
    linked = {
        name for path in NOTEBOOKS for _, source in cells(path) for name in re.findall(r"\]\((\S+\.ipynb)\)", source)
    }
    assert linked == {path.name for path in NOTEBOOKS}


def test_a_notebook_becomes_a_page_that_needs_no_other_host(starter_home, minilm, tmp_path):
    done = subprocess.run(
        [sys.executable, GALLERY, tmp_path, NOTEBOOK_FOLDER / "03_rerank.ipynb"],
        env={**os.environ, "LMX_LAB_HOME": str(starter_home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page, index = ((tmp_path / name).read_text() for name in ("03_rerank.html", "index.html"))
    assert "Desalination plants press sea water" in re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    # The panel at its end is a static snapshot.
    assert "lmx-snapshot" in page
    assert 'href="04_daemon.html"' in page
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//", page)
    assert "<em>Which of these texts answers my question?</em>" in index
    assert "How do I get salt out of sea water?\n0." in index


def test_pieces_of_text_are_one_text_on_the_page(tmp_path):
    source = "for piece in ('sea ', 'and ', 'salt'):\n    print(piece, end='', flush=True)"
    cells = [nbformat.v4.new_markdown_cell("# 98 · Stream\n\n*What?*"), nbformat.v4.new_code_cell(source)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "98_stream.ipynb")
    subprocess.run([sys.executable, GALLERY, tmp_path / "pages", tmp_path / "98_stream.ipynb"], check=True)
    assert "sea and salt" in (tmp_path / "pages" / "98_stream.html").read_text()


def test_a_failing_notebook_has_its_error_on_the_page_and_in_the_exit_status(tmp_path):
    cells = [nbformat.v4.new_markdown_cell("# 99 · Broken\n\n*Why?*"), nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "99_broken.ipynb")
    done = subprocess.run(
        [sys.executable, GALLERY, tmp_path / "pages", tmp_path / "99_broken.ipynb"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ZeroDivisionError" in (tmp_path / "pages" / "99_broken.html").read_text()
    assert "ended with an error" in (tmp_path / "pages" / "index.html").read_text()
