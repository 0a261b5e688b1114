"""Test what the site needs without building it. ``make docs`` itself fails on broken links and on warnings."""

import inspect
import runpy

import lmx_lab
import lmx_lab.client
from tests.support.docs import DOCS, ROOT

SECTIONS = runpy.run_path(str(ROOT / "tools" / "site.py"))["SECTIONS"]


def test_every_page_is_in_one_section():
    listed = [page for pages in SECTIONS.values() for page in pages]
    assert len(listed) == len(set(listed))
    assert {page.stem for page in DOCS.glob("*.md")} <= set(listed)


def test_every_public_name_and_its_methods_have_a_docstring():
    missing = []
    for package in (lmx_lab, lmx_lab.client):
        for name in package.__all__:
            found = getattr(package, name)
            if not (inspect.isclass(found) or inspect.isfunction(found)):
                continue
            members = vars(found) if inspect.isclass(found) else {}
            own = {f"{name}.{each}": value for each, value in members.items() if not each.startswith("_")}
            objects = {name: found, **{each: value for each, value in own.items() if callable(value)}}
            missing += [each for each, value in objects.items() if not inspect.getdoc(value)]
    assert missing == []
