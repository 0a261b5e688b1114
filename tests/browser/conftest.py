"""Start one JupyterLab and one Chromium for all browser tests, and check after each test that the console is empty."""

import contextlib
from pathlib import Path

import pytest
from playwright.sync_api import Error, expect

from tests.browser.jupyterlab import LAUNCH, SLEEP, Tab, serving_jupyterlab
from tests.support.browser import WAIT_MS, chromium, machine_only
from tests.support.models import write_endless_llama, write_tiny_bert

RESET = """if lab.server.engine.snapshot.model != 'tiny': lab.load('tiny')
lab.workbench.submit(lab.panel('chat').do_clear({})).result(60)"""
"""Restores the state that all tests expect."""
PICTURES = Path(__file__).parent.parent.parent / "build" / "browser"


# For the package, not the session: it runs an event loop in this thread, which other tests cannot have.
@pytest.fixture(scope="package")
def browser():
    expect.set_options(timeout=WAIT_MS)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def panels_home(tmp_path_factory, smollm2):
    """A lab's home with ``tiny`` and ``tiny-two``, whose answers end only when they are stopped, and ``tiny-bert``."""
    home = tmp_path_factory.mktemp("panels-home")
    for seed, name in enumerate(("tiny", "tiny-two")):
        write_endless_llama(home / "models" / name, smollm2.path, seed=seed, context=32768)
    write_tiny_bert(home / "models" / "tiny-bert")
    return home


@pytest.fixture(scope="package")
def jupyterlab(browser, tmp_path_factory, panels_home):
    with serving_jupyterlab(tmp_path_factory.mktemp("jupyterlab"), panels_home) as lab:
        yield lab


@pytest.fixture(scope="package")
def window(browser, jupyterlab):
    with machine_only(browser) as context:
        yield context


@pytest.fixture(scope="package")
def tabs():
    """All open tabs; the first one stays open."""
    return []


@pytest.fixture(scope="package")
def tab(window, jupyterlab, tabs):
    """A tab of JupyterLab; fixtures of modules open notebooks in it."""
    tabs.append(Tab(jupyterlab, window, "first"))
    return tabs[0]


@pytest.fixture
def another_tab(window, jupyterlab, tabs):
    """A function that opens another tab, for one test."""

    def open_tab():
        tabs.append(Tab(jupyterlab, window, f"tab-{len(tabs)}"))
        return tabs[-1]

    yield open_tab
    for each in tabs[1:]:
        each.close()
    del tabs[1:]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Write screenshots of all tabs if a test fails."""
    report = yield
    tabs = getattr(item, "funcargs", {}).get("tabs", [])
    if report.failed and report.when == "call":
        PICTURES.mkdir(parents=True, exist_ok=True)
        for number, tab in enumerate(tabs):
            with contextlib.suppress(Error):
                tab.page.screenshot(path=PICTURES / f"{item.name}-{number}.png")
    return report


@pytest.fixture(autouse=True)
def _no_foreign_request_and_no_error(tabs, another_tab):
    yield
    for tab in tabs:
        # After a call and its reply, all earlier events have arrived.
        tab.page.evaluate("0")
    foreign = [url for tab in tabs for url in tab.foreign]
    complaints = [text for tab in tabs for text in tab.complaints]
    for tab in tabs:
        tab.foreign.clear()
        tab.complaints.clear()
    assert not foreign
    assert not complaints, "\n".join(complaints)


@pytest.fixture(scope="module")
def one_panel(request, tab, jupyterlab):
    """A notebook with an echo lab and the panel that the module's constant ``PANEL`` names."""
    notebook = f"{request.module.PANEL}.ipynb"
    launch = "import lmx_lab\nlab = lmx_lab.launch('echo', port=0, loop='thread')"
    jupyterlab.write(notebook, [launch, f"lab.panel({request.module.PANEL!r})"])
    tab.open(notebook)
    tab.run(0)
    tab.run(1)
    yield tab
    tab.open(notebook)
    tab.close_notebook()


@pytest.fixture(scope="package")
def _panels(tab, jupyterlab):
    jupyterlab.write("panels.ipynb", [LAUNCH.format(loop="thread"), "lab.panel()", SLEEP])
    tab.open("panels.ipynb")
    tab.run(0)
    tab.run(1)


@pytest.fixture
def panels(tab, _panels):
    """A notebook with all panels of a lab in a thread, with ``tiny`` loaded. Many tests use it."""
    tab.open("panels.ipynb")
    tab.kernel(RESET)
    expect(tab.panel("Chat").locator(".user")).to_have_count(0)
    expect(tab.panel("Models").get_by_role("button", name="Unload tiny", exact=True).first).to_be_visible()
    return tab
