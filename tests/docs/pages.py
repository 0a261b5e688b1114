"""README and ``docs`` taken apart: code, links, tables, and what they call by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = (README, *sorted(DOCS.glob("*.md")))
LINKED = (*PAGES, *sorted(ROOT.glob("[A-Z]*.md")))
"""All pages that have links: also those at the root that are no documentation."""
FENCE = re.compile(r"```(\w*)$")
NOT_RUN = re.compile(r"<!-- not run: (.*?) *-->$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    """Of its fence, from 1."""
    language: str
    text: str
    not_run: str | None
    """The reason, in the comment above it; None where there is none."""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The page's fenced blocks, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and (opened := FENCE.match(line)):
            start, language = number, opened[1]
        elif start is not None and line == "```":
            reason = NOT_RUN.match(lines[start - 1]) if start else None
            text = "\n".join(lines[start + 1 : number])
            found.append(Block(page=page, line=start + 1, language=language, text=text, not_run=reason and reason[1]))
            start = None
    assert start is None, f"{page}: the block of line {start} does not end"
    return found


def prose(page: Path) -> str:
    """The page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Where its links and images lead."""
    return LINK.findall(prose(page))


def inline(page: Path) -> list[str]:
    """What stands in single backticks."""
    return INLINE.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def rows(page: Path, first: str) -> Iterator[dict[str, str]]:
    """Each row of the tables whose first column has this head, by the heads."""
    heads: list[str] | None = None
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            heads = None
        elif heads is None:
            heads = cells
        elif heads[0] == first and set(cells[0]) != {"-"}:
            yield dict(zip(heads, cells, strict=True))
