"""Tests that text of models, documents, tools and file names is displayed as text in panels, reports and reprs."""

import json
import re
from base64 import b64decode, b64encode
from pathlib import Path

import pytest

from lmx_lab.panels.layout import PANELS
from lmx_lab.panels.panel import script, styles
from tests.support.browser import chromium
from tests.support.labs import serving
from tests.support.models import write_tiny_llama
from tests.support.panels import Page

pytestmark = pytest.mark.slow
EVIL = (
    "<img src=x onerror='hit=1'><script>hit=1</script><svg onload='hit=1'></svg>\"'><a href=\"javascript:hit=1\">x</a>"
)
LIVE = {"img", "script", "svg", "iframe", "object", "embed", "link", "a", "form"}
# The model that a widget front end passes to render(); bytes are sent as base64 strings.
RENDER = """async ([code, css, state, bytes]) => {
    document.head.append(Object.assign(document.createElement("style"), {textContent: css}));
    const module = await import(URL.createObjectURL(new Blob([code], {type: "text/javascript"})));
    for (const name of bytes) {
        const data = Uint8Array.from(atob(state[name]), (each) => each.charCodeAt(0));
        state[name] = new DataView(data.buffer);
    }
    const el = document.createElement("div");
    document.body.append(el);
    module.default.render({el, model: {get: (name) => state[name], on() {}, off() {}, send() {}, set() {}}});
    await new Promise((done) => setTimeout(done, 200));
    const live = el.querySelectorAll("img:not([alt='QR code of the LAN address']), script, svg, iframe, a").length;
    return {text: el.textContent, live, hit: window.hit ?? null};
}"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def evil_lab(tmp_path_factory, smollm2):
    """Run a lab with a model that has HTML in its name and in its quantization."""
    home = tmp_path_factory.mktemp("home")
    folder = home / "models" / NAME
    write_tiny_llama(folder, smollm2.path, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": EVIL}}))
    with serving(home, None) as lab:
        yield lab


NAME = "<img src=x onerror='hit=1'>"
"""The part of the HTML that the name of a folder can contain."""


def with_html(value):
    """Append HTML to all strings of a value, except those that the code of the panel uses as keys."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, dict):
        return {
            key: each if key in ("id", "role", "state", "kind", "key") else with_html(each)
            for key, each in value.items()
        }
    return [with_html(each) for each in value] if isinstance(value, (list, tuple)) else value


MESSAGE = {"id": 1, "role": "assistant", "text": "", "reasoning": "hm", "stats": "1 token", "error": "no"}
JOB = {"id": "m", "text": "loading", "detail": "half", "fraction": 0.5, "actions": ["Cancel"]}
RANKED = {"cells": [1, "0.5", "text", 0, "up"], "change": "up 1", "bar": 0.5, "more": True}
ANSWER = {
    **{"caption": "all", "model": "m", "text": "", "scored": True, "branches": True},
    "tokens": [["one", "text", -0.5, 1.0, 1, 5, [["two", -1.0, 6]]]],
}
ROW = {"id": "answer", "depth": 1, "place": "at 1", "tokens": 3, "logprob": -1.0, "text": "one", "shown": True}
LANE = {"id": "r-0", "title": "12:00 r", "text": "1 s", "parts": [["decode", 0.0, 50.0, "decode 1 s"]]}
EVENT = {"id": 1, "kind": "turn.done", "at": "2026", "tone": "good", "session": "s", "text": "done", "batches": 1}
CALL = {"id": "p", "tool": "t", "session": "s", "arguments": "{}", "omitted": 0, "expires_at": "2026"}
FULL = {
    "chat": {
        "messages": [MESSAGE, {**MESSAGE, "id": 2, "role": "user"}],
        "live": {**MESSAGE, "id": 3, "status": "1 token"},
        "removed": "some",
    },
    "models": {"jobs": [JOB], "error": "failed", "caption": "all", "engines": "two"},
    "metrics": {"job": "measuring", "failures": ["wrong"]},
    "rerank": {"table": {"model": "m", "rows": [RANKED], "caption": "all", "range": "1 of 1"}, "error": "wrong"},
    "lens": {"answer": ANSWER, "branches": [ROW], "error": "wrong"},
    "timeline": {"lanes": [LANE], "problem": "wrong"},
    "events": {
        "connection": {"state": "live", "text": "live", "place": "here", "error": "wrong"},
        "frame": {"numbering": 1, "base": 0, "total": 1, "first": 0, "rows": [EVENT], "summary": "one"},
        "sessions": [{"id": "s", "name": "one", "status": "idle"}],
        "live": {"id": "s", "name": "one", "status": "running", "activity": "a", "thoughts": "hm", "text": "one"},
        "permissions": [CALL],
    },
}


@pytest.mark.parametrize("name", PANELS)
def test_no_panel_creates_elements_from_text(browser, evil_lab, name):
    panel = evil_lab.panel(name)
    state = {key: value for key, value in panel.get_state().items() if not key.startswith("_") and key != "layout"}
    assert FULL[name].keys() <= state.keys()
    state |= FULL[name]
    bytes_of = [key for key, value in state.items() if isinstance(value, (bytes, memoryview))]
    sent = {
        key: b64encode(bytes(value)).decode()
        if key in bytes_of
        else with_html(json.loads(json.dumps(value, default=str)))
        for key, value in state.items()
    }
    page = browser.new_page()
    scripts = script(*PANELS[name].SCRIPTS)
    shown = page.evaluate(RENDER, [scripts, styles(*PANELS[name].STYLES), sent, bytes_of])
    page.close()
    assert "<img src=x" in shown["text"], "it is displayed as text"
    assert (shown["live"], shown["hit"]) == (0, None)


CHART = re.compile(
    r'<img width="\d+" height="\d+" style="[\w:;%-]+" alt="[^"<>]*" src="data:image/svg\+xml;base64,([\w+/=]+)">'
)


def elements(text):
    """Return the elements of a page that could load or run something. Charts are images, which are searched too."""
    found = []
    for tag, attributes in Page(CHART.sub("", text)).elements:
        found += [tag] if tag in LIVE - {"svg"} else []
        found += [
            f"{tag} {name}={value}"
            for name, value in attributes.items()
            if name.startswith("on") or (name in ("href", "src") and value)
        ]
    return [*found, *(each for image in CHART.findall(text) for each in elements(b64decode(image).decode()))]


def test_reports_and_snapshots_contain_no_elements_from_text(evil_lab, tmp_path):
    pages = [Path(evil_lab.report(tmp_path / "report.html")).read_text()]
    for name in PANELS:
        bundle = evil_lab.panel(name)._repr_mimebundle_()
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        pages.append(str(data.get("text/html", "")))
    assert any("&lt;img" in page for page in pages), "they contain the name of the model"
    assert [found for page in pages for found in elements(page)] == []
