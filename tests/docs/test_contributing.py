"""Test that the page for contributors describes the packages and files as they are."""

from __future__ import annotations

import functools
import re
from itertools import product

from tests.docs.pages import DOCS, ROOT, code_blocks, inline_code, table_rows
from tests.test_architecture import EVERYTHING, TABLE, imports, room

PAGE = DOCS / "contributing.md"
FOLDERS = (ROOT, ROOT / "lmx_lab")
"""Paths of files are relative to one of these."""


@functools.cache
def arrows() -> set[tuple[str, str]]:
    """Return the arrows of the diagram, as pairs of packages."""
    (diagram,) = [block.text for block in code_blocks(PAGE) if block.language == "mermaid"]
    lines = [line.split(" --> ") for line in diagram.splitlines()[1:]]
    return {pair for sources, targets in lines for pair in product(sources.strip().split(" & "), targets.split(" & "))}


@functools.cache
def reachable(start: str) -> set[str]:
    found: set[str] = set()
    new = {start}
    while new:
        found |= new
        new = {target for source, target in arrows() if source in new} - found
    return found


def test_arrows_are_allowed_imports() -> None:
    for source, target in arrows():
        assert TABLE[source].inside == EVERYTHING or target in TABLE[source].inside.split(), (source, target)


def test_every_import_between_packages_follows_the_arrows() -> None:
    packages = {name for pair in arrows() for name in pair}
    for item in imports():
        source, target = room(item.module), room(item.target.removeprefix("lmx_lab."))
        if item.target.startswith("lmx_lab.") and {source, target} <= packages:
            assert target in reachable(source), str(item)


def test_every_package_and_module_is_described() -> None:
    rows = {row["package"].strip("`") for row in table_rows(PAGE, "package")}
    folders = {path.parent.name for path in (ROOT / "lmx_lab").glob("*/__init__.py")}
    assert folders <= rows
    assert set(TABLE) - {"__init__", "__main__"} <= rows | set(inline_code(PAGE))


def test_every_file_that_is_named_exists() -> None:
    for text in inline_code(PAGE):
        if re.fullmatch(r"[\w/]+\.(py|md|js|css)|(lmx_lab|tests|docs)/[\w/]+", text):
            name = "lmx_lab/panels/panel.css" if text == "panel.css" else text
            assert (
                any((folder / name).exists() for folder in FOLDERS) or (ROOT / "lmx_lab" / "engine" / name).exists()
            ), text
