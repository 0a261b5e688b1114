"""What README and ``docs`` point at is there: links, images, names in Python, commands, flags, routes, packages."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from lmx_lab.cli.commands import app
from lmx_lab.engine import ModelManager
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.notebook import AttachedLab, Lab
from lmx_lab.server import create_server
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog
from tests.docs.pages import DOCS, LINKED, PAGES, README, ROOT, anchors, blocks, inline, links, rows

TWO_SCREENS = 150
"""Lines of the README: what there is more of goes to ``docs``."""
OF_OTHERS = {"--json", "--raw", "--no-deps"}
"""Flags of curl, of ``%%lmx`` and of pip."""


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_readme_is_two_screens_long() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= TWO_SCREENS


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_every_link_and_image_leads_somewhere(page: Path) -> None:
    broken = [link for link in links(page) if not link.startswith("https://") and not leads_somewhere(page, link)]
    assert not broken


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_every_page_can_be_reached_from_the_readme() -> None:
    linked = {(README.parent / link.partition("#")[0]).resolve() for link in links(README)}
    assert {page for page in PAGES if page != README} <= linked


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_is_called_lmx_lab_something_is_there(page: Path) -> None:
    names = {name for text in inline(page) for name in re.findall(r"\blmx_lab(?:\.\w+)+", text)}
    assert not [name for name in names if not is_there(name)]


def is_there(name: str) -> bool:
    found: Any = importlib.import_module("lmx_lab")
    for part in name.split(".")[1:]:
        try:
            found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")
        except (ImportError, AttributeError):
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_lab_has_what_is_said_of_it(page: Path) -> None:
    names = {name for text in inline(page) for name in re.findall(r"\blab\.(\w+)", text)}
    assert not [name for name in names if not (hasattr(Lab, name) or hasattr(AttachedLab, name) or name == "settings")]


def commands() -> dict[str, set[str]]:
    """The flags of each command, by its name; of the command line itself under no name."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return {
        name: {"--help", *(flag for option in command.params for flag in (*option.opts, *option.secondary_opts))}
        for name, command in {"": group, **group.commands}.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_and_flags_are_those_of_the_command_line(page: Path) -> None:
    texts = [*inline(page), *(block.text for block in blocks(page) if block.language == "bash")]
    told = {name for text in texts for name in re.findall(r"\blmx-lab ([a-z]+)", text)}
    assert told <= set(commands())
    known = OF_OTHERS.union(*commands().values())
    given = {flag for text in inline(page) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert given <= known


@pytest.fixture(scope="module")
def routes() -> set[str]:
    """The paths of the model's server."""
    settings = Settings()
    policy = GuardPolicy(hosts=frozenset())
    manager, catalog = ModelManager(settings), Catalog(settings)
    api = create_server(manager=manager, catalog=catalog, settings=settings, policy=lambda: policy).api
    return set(api.openapi()["paths"])


@pytest.mark.parametrize("page", [README, DOCS / "server.md"], ids=named)
def test_the_table_of_routes_is_complete(page: Path, routes: set[str]) -> None:
    told = {path for row in rows(page, "route") for path in re.findall(r"(/[\w/{}.]+)", row["route"])}
    beside = {"/v1/chat/stream", "/docs", "/openapi.json"}
    assert {re.sub(r"\{\w+\}", "{}", path) for path in told - beside} == {
        re.sub(r"\{\w+(:path)?\}", "{}", path) for path in routes - beside
    }


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = {re.split(r"[\[<>=; ]", text)[0] for text in (*project["dependencies"], *extras["lab"], *extras["gguf"])}
    told = [re.sub(r"\(.*?\)", "", row["package"]) for row in rows(README, "package")]
    assert needed <= {name.strip() for names in told for name in names.split(",")}
