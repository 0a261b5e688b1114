"""Test that everything README and ``docs`` refer to exists: links, images, Python names, commands, flags, routes."""

import importlib
import re
import subprocess
import tomllib

import httpx2
import pytest
import typer

import lmx_lab
from lmx_lab.cli.app import app
from lmx_lab.engine import ModelManager
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.notebook.lab import Lab
from lmx_lab.server import create_server
from lmx_lab.settings import Settings
from tests.support.docs import (
    DOCS,
    PAGES,
    PAGES_WITH_LINKS,
    README,
    ROOT,
    anchors,
    code_blocks,
    inline_code,
    links,
    table_rows,
)

OTHER_FLAGS = {
    *("--json", "--raw", "--no-deps", "--to", "--only", "--quick", "--count", "--kills", "--seed", "--allow-root"),
    *("--map", "--column", "--into", "--cache", "--temperature", "--system"),
}
"""Flags of curl, ``%%lmx``, pip, nbconvert, JupyterLab and ``python -m soak``."""


def page_name(page):
    return str(page.relative_to(ROOT))


def test_the_readme_is_two_screens_long():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", [README, DOCS / "install.md", DOCS / "contributing.md"], ids=page_name)
def test_the_first_two_commands_run_the_quickstart_and_the_tests(page):
    first = next(block for block in code_blocks(page) if block.language == "bash")
    assert re.findall(r"^make (\w+)", first.text, flags=re.MULTILINE) == ["demo", "test"]
    assert first.text == next(iter(code_blocks(README))).text


def test_ci_runs_the_targets_that_are_named_with_all_tests_of_the_second_command():
    targets = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1].removeprefix("exec ")
    for page in (README, DOCS / "contributing.md"):
        assert f"CI runs `{targets}`" in page.read_text(encoding="utf-8")
    # Of all tests, ``make test`` leaves some out.
    for target, selection in (("test", ' -m "not long"'), (targets.split()[-1], "")):
        planned = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        (options,) = re.findall(r"-m pytest --durations .*--no-loadscope-reorder(.*)", planned)
        assert options.partition(" ||")[0] == selection


@pytest.mark.parametrize("page", PAGES_WITH_LINKS, ids=page_name)
def test_the_target_of_every_link_and_image_exists(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        exists = link.startswith("https://") or (target.exists() and (not anchor or anchor in anchors(target)))
        assert exists, link


def test_the_readme_links_every_page():
    linked = {(README.parent / link.partition("#")[0]).resolve() for link in links(README)}
    assert {page for page in PAGES if page != README} <= linked


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_dotted_name_below_lmx_lab_exists(page):
    names = {name for text in inline_code(page) for name in re.findall(r"\blmx_lab(?:\.\w+)+", text)}
    assert not [name for name in names if not name_exists(name)]


def name_exists(name):
    value = importlib.import_module("lmx_lab")
    for part in name.split(".")[1:]:
        try:
            value = getattr(value, part, None) or importlib.import_module(f"{value.__name__}.{part}")
        except (ImportError, AttributeError):
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_lab_has_every_attribute_that_is_named(page):
    names = {name for text in inline_code(page) for name in re.findall(r"(?<![\w/-])lab\.(\w+)", text)}
    assert not [name for name in names if not hasattr(Lab, name)]


def flags_by_command():
    """Return the flags of each command; the key "" has those of ``lmx-lab`` itself."""
    group = typer.main.get_command(app)
    return {
        name: {"--help", *(flag for option in command.params for flag in (*option.opts, *option.secondary_opts))}
        for name, command in {"": group, **group.commands}.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_and_flag_exists(page):
    flags = flags_by_command()
    texts = [*inline_code(page), *(block.text for block in code_blocks(page) if block.language == "bash")]
    commands = {name for text in texts for name in re.findall(r"\blmx-lab ([a-z]+)", text)}
    assert commands <= set(flags)
    named = {flag for text in inline_code(page) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    assert named <= OTHER_FLAGS.union(*flags.values())


@pytest.fixture(scope="module")
def routes():
    """The paths of the inference server."""
    policy = GuardPolicy(hosts=frozenset())
    api = create_server(manager=ModelManager(Settings()), policy=lambda: policy).api
    return set(api.openapi()["paths"])


@pytest.mark.slow
def test_the_table_of_routes_is_complete(routes):
    rows = table_rows(DOCS / "server.md", "route")
    documented = {path for row in rows for path in re.findall(r"(/[\w/{}.-]+)", row["route"])}
    not_in_openapi = {"/v1/chat/stream", "/about", "/docs", "/openapi.json"}
    assert {re.sub(r"\{\w+\}", "{}", path) for path in documented - not_in_openapi} == {
        re.sub(r"\{\w+(:path)?\}", "{}", path) for path in routes - not_in_openapi
    }


@pytest.mark.slow
def test_every_route_has_an_example_that_is_run(routes, tmp_path):
    with lmx_lab.launch(home=tmp_path, port=0, daemon_port=0) as lab:
        daemon = lab.start_daemon()
        headers = {"Authorization": f"Bearer {daemon.token}"}
        routes = routes | set(httpx2.get(f"{daemon.url}/v3/openapi.json", headers=headers).json()["paths"])
        daemon.stop()
    text = "\n".join(block.text for block in code_blocks(DOCS / "routes.md") if block.not_run is None)
    shown = {match.rstrip("/") for match in re.findall(r"(?:8400|8401|daemon \"?)(/[\w/$.-]+)", text)}
    patterns = [re.sub(r"\{\w+(:path)?\}", r"[^/]+", path) for path in routes - {"/v1/chat/stream"}]
    assert [each for each in patterns if not any(re.fullmatch(each, path) for path in shown)] == []


def test_the_table_of_dependencies_is_complete():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = {re.split(r"[\[<>=; ]", text)[0] for text in (*project["dependencies"], *extras["lab"], *extras["gguf"])}
    cells = [re.sub(r"\(.*?\)", "", row["package"]) for row in table_rows(DOCS / "dependencies.md", "package")]
    assert required <= {name.strip() for names in cells for name in names.split(",")}


# The page for contributors


PAGE = DOCS / "contributing.md"


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
            assert any((folder / name).exists() for folder in (ROOT, ROOT / "lmx_lab", ROOT / "lmx_lab/engine")), text
