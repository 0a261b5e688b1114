"""Test that the page for contributors describes the packages and files as they are."""

import re
import subprocess

from tests.support.docs import DOCS, ROOT, inline_code, table_rows

PAGE = DOCS / "contributing.md"
FOLDERS = (ROOT, ROOT / "lmx_lab")
"""Paths of files are relative to one of these."""


def test_every_package_and_module_is_described():
    rows = {row["package"].strip("`") for row in table_rows(PAGE, "package")}
    folders = {path.parent.name for path in (ROOT / "lmx_lab").glob("*/__init__.py")}
    assert folders <= rows
    modules = {path.stem for path in (ROOT / "lmx_lab").glob("*.py")}
    assert folders | modules - {"__init__", "__main__"} <= rows | set(inline_code(PAGE))


def test_the_modules_of_a_package_are_in_its_folder():
    for row in table_rows(PAGE, "package"):
        folder = ROOT / "lmx_lab" / row["package"].strip("`")
        for name in re.findall(r"`(\w+)`", row["its modules and folders, or their subjects"]):
            assert (folder / name).is_dir() or (folder / f"{name}.py").is_file(), f"{row['package']}: {name}"


def test_the_table_of_the_repository_has_all_that_is_visible_in_it():
    rows = [name for row in table_rows(PAGE, "path") for name in re.findall(r"`(.+?)`", row["path"])]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(rows) == {name.partition("/")[0] for name in listed.splitlines() if not name.startswith(".")}


def test_every_file_that_is_named_exists():
    for text in inline_code(PAGE):
        if re.fullmatch(r"[\w/]+\.(py|md|js|css)|(lmx_lab|tests|docs)/[\w/]+", text):
            name = "lmx_lab/panels/panel.css" if text == "panel.css" else text
            assert (
                any((folder / name).exists() for folder in FOLDERS) or (ROOT / "lmx_lab" / "engine" / name).exists()
            ), text
