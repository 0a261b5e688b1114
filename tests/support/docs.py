"""Read the pages of the documentation and the notebooks, and run the examples of a page."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = (README, *sorted(DOCS.glob("*.md")))
PAGES_WITH_LINKS = (*PAGES, *sorted(ROOT.glob("[A-Z]*.md")))
"""All pages whose links are checked, including those at the root that are no documentation."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced code block of a page."""

    page: Path
    line: int
    """Line number of its opening fence, starting at 1."""
    language: str
    text: str
    not_run: str | None
    """Why the block is not run, from the comment above it; None if it is run."""

    @property
    def location(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def code_blocks(page: Path) -> list[Block]:
    """Return the page's fenced blocks, in order."""
    blocks: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and (opened := re.match(r"```(\w*)$", line)):
            start, language = number, opened[1]
        elif start is not None and line == "```":
            reason = re.match(r"<!-- not run: (.*?) *-->$", lines[start - 1]) if start else None
            text = "\n".join(lines[start + 1 : number])
            blocks.append(Block(page=page, line=start + 1, language=language, text=text, not_run=reason and reason[1]))
            start = None
    assert start is None, f"{page}: the block that starts at line {start} is not closed"
    return blocks


def prose(page: Path) -> str:
    """Return the text of the page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Return the targets of the page's links and images."""
    return re.findall(r"!?\[[^\]]*\]\(([^()\s]+)\)", prose(page))


def inline_code(page: Path) -> list[str]:
    """Return the texts in single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub generates them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def table_rows(page: Path, first: str) -> Iterator[dict[str, str]]:
    """Yield the rows of all tables whose first column is named ``first``, as dicts with the column names as keys."""
    names: list[str] | None = None
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            names = None
        elif names is None:
            names = cells
        elif names[0] == first and set(cells[0]) != {"-"}:
            yield dict(zip(names, cells, strict=True))


WAIT_S = 120
CURLRC = "fail-with-body\nno-progress-meter\nmax-time = 60\n"
"""Makes curl fail on error responses, so that they fail the block."""


def run_command(command: Sequence[str], folder: Path, environ: Mapping[str, str], *, limit_s: float = WAIT_S) -> str:
    """Run a command in a folder and return its standard output and standard error together.

    Raises:
        AssertionError: the exit status is not 0.
    """
    completed = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert completed.returncode == 0, f"exit status {completed.returncode}:\n{completed.stdout}"
    return completed.stdout


NOTEBOOK_FOLDER = Path(__file__).parent.parent.parent / "notebooks"
NOTEBOOKS = sorted(NOTEBOOK_FOLDER.glob("*.ipynb"))
