"""Test the code of the panels and pages: its size, its completeness, that it loads nothing from other hosts, and the
conversion of conversations."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from lmx_lab.panels.layout import PANELS
from lmx_lab.panels.metrics import MetricsPanel
from lmx_lab.panels.panel import FOLDER, Panel, script, source, styles
from lmx_lab.server.pages import BUILT, SOURCES, chat_page, routes_page
from tests.support.programs import needs_node, node

MAX_BYTES = 100 * 1024
"""Maximum size of the code of all panels that do not need a daemon. uPlot is 51 KiB of it."""
MAX_BYTES_WITH_DAEMON = 11 * 1024
"""Maximum size of the code of panels that need a daemon."""
STUBS = """
const newId = () => "id", titleOf = () => "title", SAMPLING = [["temperature"]];
const newChat = () => ({ system: "", sampling: {}, messages: [] });
"""
CLASSES = list(PANELS.values())
UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
OWN = sorted(path.name for path in FOLDER.glob("*.js"))


def modules():
    return {name: script(*panel.SCRIPTS) for name, panel in PANELS.items()}


def test_all_panels_together_are_small():
    sizes = {name: len(module.encode()) for name, module in modules().items()}
    with_daemon = {name: sizes.pop(name) for name, panel in PANELS.items() if panel.NEEDS_DAEMON}
    assert sum(with_daemon.values()) <= MAX_BYTES_WITH_DAEMON, with_daemon
    assert sum(sizes.values()) <= MAX_BYTES, sizes


@pytest.mark.parametrize("panel", CLASSES)
def test_a_widget_has_its_module_and_its_styles(panel):
    assert str(panel._esm) == script(*panel.SCRIPTS)
    assert str(panel._css) == styles(*panel.STYLES)


def test_a_new_panel_can_be_imported_before_its_code_is_built(tmp_path):
    for name in ("panel.js", "new.js"):
        (tmp_path / name).write_text(f"// {name}", encoding="utf-8")
    assert script("panel.js", "new.js", folder=tmp_path) == "// panel.js\n// new.js"


def test_vendored_files_are_unchanged():
    readme = source("uplot/README.md")
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        digest = hashlib.sha256((FOLDER / "uplot" / name).read_bytes()).hexdigest()
        assert f"| `{name}` | `dist/{name}` | `{digest}` |" in readme
    assert UPLOT in readme
    assert script(*MetricsPanel.SCRIPTS).startswith(source("uplot/uPlot.iife.min.js"))
    assert "MIT" in source("uplot/LICENSE")


def test_the_code_does_not_refer_to_other_hosts():
    for module in modules().values():
        assert set(re.findall(r"https?://[\w./-]+", module)) <= {"https://github.com/leeoniya/uPlot"}
    for panel in CLASSES:
        assert not re.search(r"url\(|@import", styles(*panel.STYLES))


@pytest.mark.parametrize("name", OWN)
def test_text_never_becomes_markup(name):
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", source(name))


@needs_node
@pytest.mark.parametrize("panel", CLASSES)
def test_each_panels_module_has_valid_syntax(panel: type[Panel], tmp_path: Path) -> None:
    path = tmp_path / "module.mjs"
    path.write_text(script(*panel.SCRIPTS), encoding="utf-8")
    node("--check", str(path))


@pytest.mark.parametrize("panel", CLASSES)
def test_the_minified_code_is_up_to_date(panel):
    """If this fails, run ``make panels``."""
    pytest.importorskip("minify", reason="tdewolff-minify is not installed: there are no wheels for macOS")
    from lmx_lab.panels.build import minify_module

    assert source(f"built/{panel.SCRIPTS[-1]}") == minify_module(*panel.SCRIPTS)


def test_the_pages_are_up_to_date_small_and_complete_in_one_file():
    """If this fails, run ``make panels``."""
    pytest.importorskip("minify", reason="tdewolff-minify is not installed: there are no wheels for macOS")
    from lmx_lab.panels.build import page_files

    for name, text in page_files().items():
        assert (BUILT / name).read_text(encoding="utf-8") == text
        # The document contains these files as they are, and must not load others.
        assert not re.search(r"</|url\(|@import|https?://[\w]", text.replace("https?:", ""))
    chat, routes = (len(gzip.decompress(page.compressed)) for page in (chat_page(), routes_page()))
    assert chat + sum(icon.stat().st_size for icon in SOURCES.glob("icon-*.png")) < 120_000
    assert routes < 40_000


# --- the chat page's conversations


def text(value):
    return {"type": "text", "text": value}


def message(role, content):
    return {"role": role, "content": content}


def prompts(folder, *files):
    """Return the messages that the page sends for the conversation of each file."""
    call = "const files = %s; console.log(JSON.stringify(files.map((file) => toChatMessages(fromFile(file)[0]))))"
    program = (
        STUBS
        + (SOURCES / "page_file.js").read_text(encoding="utf-8")
        + call % json.dumps([json.dumps(file) for file in files])
    )
    path = folder / "script.js"
    path.write_text(program, encoding="utf-8")
    return json.loads(node(str(path)))


@needs_node
def test_system_messages_are_read_and_kept_in_their_place(tmp_path):
    question, answer = message("user", "Hi."), message("assistant", "Hello.")
    parts = message("system", [text("One. "), text("Two.")])
    prompt, later, last = message("system", "One. Two."), message("system", "Three."), message("user", "And?")
    assert prompts(
        tmp_path,
        [parts, later, question, answer],
        {"version": 1, "messages": [question, parts, answer, last, later]},
        {"messages": [prompt, question, later, last]},
    ) == [
        [prompt, later, question, answer],
        [question, prompt, answer, last, later],
        [prompt, later, last],
    ]


@needs_node
def test_a_long_conversation_is_sent_with_its_system_prompt(tmp_path):
    pairs = [message(role, f"{role} {at}") for at in range(2050) for role in ("user", "assistant")]
    prompt = message("system", "Be brief.")
    assert prompts(tmp_path, [prompt, *pairs], pairs) == [[prompt, *pairs[-3999:]], pairs[-4000:]]
