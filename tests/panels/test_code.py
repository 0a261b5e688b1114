"""The panels' code as widgets carry it: small, complete, and of this machine only."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lmx_lab.panels import code
from lmx_lab.panels.chat import ChatPanel
from lmx_lab.panels.metrics import MetricsPanel
from lmx_lab.panels.minify import minified
from lmx_lab.panels.models import ModelsPanel
from lmx_lab.panels.panel import Panel
from lmx_lab.panels.rerank import RerankPanel

PANELS: tuple[type[Panel], ...] = (ModelsPanel, MetricsPanel, ChatPanel, RerankPanel)
MOST_BYTES = 70 * 1024
UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
OWN = sorted(path.name for path in code.FOLDER.glob("*.js"))
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed; the browser tests run the same code")


def modules() -> dict[str, str]:
    return {panel.__name__: code.script(*panel.SCRIPTS) for panel in PANELS}


def node(*arguments: str) -> str:
    assert NODE is not None
    done = subprocess.run([NODE, *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def test_all_panels_together_are_small() -> None:
    sizes = {name: len(module.encode()) for name, module in modules().items()}
    assert sum(sizes.values()) <= MOST_BYTES, sizes


@pytest.mark.parametrize("panel", PANELS)
def test_a_widget_carries_its_module_and_its_styles(panel: type[Panel]) -> None:
    assert str(panel._esm) == code.script(*panel.SCRIPTS)
    assert str(panel._css) == code.styles(*panel.STYLES)


def test_what_is_vendored_is_what_was_published() -> None:
    readme = code.source("uplot/README.md")
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        digest = hashlib.sha256((code.FOLDER / "uplot" / name).read_bytes()).hexdigest()
        assert f"| `{name}` | `dist/{name}` | `{digest}` |" in readme
    assert UPLOT in readme
    assert code.script(*MetricsPanel.SCRIPTS).startswith(code.source("uplot/uPlot.iife.min.js"))
    assert "MIT" in code.source("uplot/LICENSE")


def test_no_code_names_another_host() -> None:
    for module in modules().values():
        assert set(re.findall(r"https?://[\w./-]+", module)) <= {"https://github.com/leeoniya/uPlot"}
    for panel in PANELS:
        assert not re.search(r"url\(|@import", code.styles(*panel.STYLES))


@pytest.mark.parametrize("name", OWN)
def test_text_never_becomes_markup(name: str) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", code.source(name))


@needs_node
@pytest.mark.parametrize("panel", PANELS)
def test_a_module_is_one(panel: type[Panel], tmp_path: Path) -> None:
    path = tmp_path / "module.mjs"
    path.write_text(code.script(*panel.SCRIPTS), encoding="utf-8")
    node("--check", str(path))


def test_comments_and_space_go_and_texts_stay() -> None:
    text = """
    // A comment with "quotes" and `more`.
    const greeting = "two  spaces // no comment"; /* gone */
    const pattern = /[/"'] x/g;
    const half = greeting.length / 2 / 1;
    """
    assert minified(text) == 'const a="two  spaces // no comment";const b=/[/"\'] x/g;const c=a.length/2/1;'


def test_a_line_break_that_may_end_a_statement_stays() -> None:
    assert minified("if (x) {\n  y()\n}\nz()") == "if(x){y()}\nz()"
    assert minified("a = b + +c - -d\ne++") == "a=b+ +c- -d\ne++"


@pytest.mark.parametrize(
    "text",
    [
        "const value=1;const o={value};",
        "const value=1;o.value=2;",
        "const value=1;o?.value;",
        "const value=1;const o={value:2};",
        "const{value}=o;value;",
        "const value=1;const o={async value(){}};",
        "const value=1;`${value}`;",
    ],
)
def test_what_may_be_a_property_keeps_its_name(text: str) -> None:
    assert "value" in minified(text)
    assert minified(text).count("value") == text.count("value")


def test_variables_get_short_names_that_nothing_else_has() -> None:
    text = (
        "const first=1;const a=(second,third=first,...others)=>second+third+others.length;let[fourth,b]=a(first);fourth"
    )
    assert minified(text) == "const c=1;const a=(f,g=c,...e)=>f+g+e.length;let[d,b]=a(c);d"


PROGRAM = r"""
// Everything that the panels' code does, in small.
const outer = { name: "outer", list: [1, 2, 3] };
const sum = (numbers, start = 0) => {
  let total = start; // grows
  for (const number of numbers) total += number
  return total;
};
const { name: title, list: [head, ...tail] } = outer;
const maker = ({ label, deep: { inner } = { inner: "none" } }) => ({ label, inner, show() { return label + inner; } });
const counter = (() => {
  let counted = 0;
  return () => counted++
})();
counter();
const words = ["b-a", "c/d"].map((word) => word.replace(/[-/]/g, "_"));
const chosen = sum(tail) > 4 ? `more: ${sum(tail)} of ${title}` : "less";
console.log(title, head, tail, sum(outer.list, 10), maker({ label: "x" }).show(), counter(), words, chosen);
try { null.x } catch (error) { console.log(error instanceof TypeError) }
"""


@needs_node
def test_what_was_made_small_does_the_same() -> None:
    small = minified(PROGRAM)
    assert len(small) < 0.8 * len(PROGRAM)
    assert node("-e", small) == node("-e", PROGRAM) != ""
