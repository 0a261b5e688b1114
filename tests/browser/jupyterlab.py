"""Drive JupyterLab in Chromium as a user of a notebook does, and use the panels in it."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import (
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    WebSocket,
    expect,
)
from playwright.sync_api import Error as PlaywrightError

from tests.support.browser import FOREIGN, WAIT_MS, serious_violations
from tests.support.jupyter import jupyter_server

Message = tuple[float, dict[str, Any]]
"""A message of a kernel: its time (``time.monotonic``), and its header and content."""
KERNEL_ATTEMPTS = 3
LOG_CHARACTERS = 4000
# JupyterLab itself writes this error to the console for any notebook, some time after a connection was cut.
BENIGN = "Could not restore the debugger state"
SETTINGS = {
    # No requests for news and versions to other hosts.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    # All cells are rendered, also those that are not visible.
    "notebook-extension/tracker": {"windowingMode": "none"},
    # No dialog about closing a kernel, which would wait forever.
    "docmanager-extension/plugin": {"autosave": False},
}
OPEN = """async ([path, wanted, attempts, patience]) => {
    const app = window.jupyterapp;
    await app.restored;
    const without = wanted ? {} : {kernelPreference: {shouldStart: false, canStart: false}};
    const panel = await app.commands.execute("docmanager:open", {path, factory: "Notebook", ...without});
    await panel.context.ready;
    if (!wanted) return;
    await panel.sessionContext.ready;
    await panel.revealed;
    const kernel = panel.sessionContext.session?.kernel;
    if (!kernel) return;
    // Its first request to the kernel can be lost during a slow start; each new connection repeats it.
    for (let attempt = 0; attempt < attempts; attempt++) {
        if (attempt) await kernel.reconnect();
        const late = new Promise((resolve) => setTimeout(resolve, patience, "late"));
        if (await Promise.race([kernel.info, late]) !== "late") return;
    }
    throw new Error(`the kernel is ${kernel.status}, ${kernel.connectionStatus}, and does not say what it is`);
}"""
CURRENT = "const app = window.jupyterapp, panel = app.shell.currentWidget;"
RUN = """async ([index, wait]) => {
    const app = window.jupyterapp, panel = app.shell.currentWidget;
    panel.content.activeCellIndex = index;
    panel.content.deselectAll();
    const done = app.commands.execute("notebook:run-cell");
    if (!wait) return null;
    await done;
    const error = panel.content.widgets[index].model.outputs.toJSON().find((each) => each.output_type === "error");
    return error ? error.ename + ": " + error.evalue : null;
}"""
KERNEL = """async (code) => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    const future = kernel.requestExecute({code, store_history: false, silent: false});
    let text = "", error = null;
    future.onIOPub = ({header, content}) => {
        if (header.msg_type === "stream" && content.name === "stdout") text += content.text;
        if (header.msg_type === "error") error = content.ename + ": " + content.evalue;
    };
    await future.done;
    return [text, error];
}"""


@dataclass(frozen=True, kw_only=True)
class JupyterLab:
    """A running server with its own folders, and its notebooks."""

    folder: Path
    """The folder of the notebooks."""
    url: str
    token: str
    log: Path

    def write(self, name: str, cells: Sequence[str]) -> None:
        """Write a notebook of code cells without outputs."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.folder / name)


@contextmanager
def serving_jupyterlab(folder: Path, home: Path) -> Iterator[JupyterLab]:
    """Run JupyterLab with its own folders until the end of the block; labs in its kernels have this home."""
    notebooks, token = folder / "notebooks", secrets.token_hex(16)
    notebooks.mkdir(parents=True)
    for name, values in SETTINGS.items():
        package, plugin = name.split("/")
        path = folder / "settings" / "@jupyterlab" / package / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    options = [
        *("--expose-app-in-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"),
        *(f"--ServerApp.root_dir={notebooks}", f"--IdentityProvider.token={token}"),
        "--LabApp.extension_manager=readonly",
    ]
    environ = {
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
        "LMX_LAB_HOME": str(home),
    }
    with jupyter_server(folder, *options, app=("jupyter", "lab"), **environ) as server:
        yield JupyterLab(folder=notebooks, url=f"http://127.0.0.1:{server.port}", token=token, log=server.log)


class Tab:
    """A tab of the browser with JupyterLab."""

    def __init__(self, lab: JupyterLab, context: BrowserContext, workspace: str) -> None:
        self.lab = lab
        self.foreign: list[str] = []
        """Requests to other hosts, all of which were blocked."""
        self.complaints: list[str] = []
        """Errors on the console, and uncaught exceptions."""
        self.messages: list[Message] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"{error.name}: {error.message}\n{error.stack}"))
        self.page.on("request", self._request)
        self.page.on("websocket", self._websocket)
        self.page.goto(f"{lab.url}/lab/workspaces/{workspace}?token={lab.token}")
        self.page.wait_for_function("window.jupyterapp?.restored")
        self.page.evaluate("window.jupyterapp.restored.then(() => window.jupyterapp.shell.collapseLeft())")

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and BENIGN not in message.text:
            self.complaints.append(f"{message.text} ({message.location.get('url')})")

    def _request(self, request: Request) -> None:
        if FOREIGN.match(request.url):
            self.foreign.append(request.url)

    def _websocket(self, socket: WebSocket) -> None:
        if FOREIGN.match(socket.url):
            self.foreign.append(socket.url)
        socket.on("framereceived", self._frame)

    def _frame(self, payload: str | bytes) -> None:
        if isinstance(payload, bytes) and (message := kernel_message(payload)) is not None:
            self.messages.append((time.monotonic(), message))

    # Notebooks

    def open(self, name: str, *, kernel: bool = True) -> None:
        """Open a notebook with its kernel, which may be the running one of another tab."""
        try:
            self.page.evaluate(OPEN, [name, kernel, KERNEL_ATTEMPTS, WAIT_MS])
        except PlaywrightError as exc:
            log = self.lab.log.read_text(encoding="utf-8", errors="replace")
            raise AssertionError(f"{name} could not be opened: {exc}\n{log[-LOG_CHARACTERS:]}") from exc

    def run(self, index: int) -> Locator:
        """Run a cell that must not fail, wait for its end, and return its outputs."""
        error = self.page.evaluate(RUN, [index, True])
        assert error is None, error
        return self.outputs(index)

    def start(self, index: int) -> Locator:
        """Run a cell without waiting."""
        self.page.evaluate(RUN, [index, False])
        return self.outputs(index)

    def cell(self, index: int) -> Locator:
        return self.page.locator(f".jp-Notebook:visible .jp-Cell[data-windowed-list-index='{index}']")

    def outputs(self, index: int) -> Locator:
        return self.cell(index).locator(".jp-Cell-outputWrapper")

    def panel(self, label: str) -> Locator:
        """Return the views of a panel by its label, such as ``Models``."""
        return self.page.locator(f".jp-Notebook:visible section.lmx[aria-label='{label}']")

    def kernel(self, code: str) -> str:
        """Run code in the notebook's kernel after all running cells, and return its printed text."""
        text, error = self.page.evaluate(KERNEL, code)
        if error:
            raise AssertionError(f"{error}\nin\n{code}")
        return str(text).strip()

    def start_code(self, code: str) -> None:
        """Start code in the notebook's kernel without waiting for its end."""
        self.page.evaluate(
            f"code => {{ {CURRENT} panel.sessionContext.session.kernel.requestExecute({{code}}); }}", code
        )

    def command(self, name: str, **arguments: Any) -> None:
        """Execute a command of JupyterLab."""
        self.page.evaluate(
            "([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => 0)", [name, arguments]
        )

    def theme(self, name: str) -> None:
        """Set the theme, ``light`` or ``dark``."""
        self.command("apputils:change-theme", theme=f"JupyterLab {name.capitalize()}")
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight === String(light)", arg=name == "light"
        )
        # JupyterLab removes its indicator a moment later, which fails if another change has removed it before.
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")

    def add_cell(self, source: str) -> None:
        """Add a cell at the end of the notebook."""
        self.page.evaluate(
            f"source => {{ {CURRENT} panel.content.model.sharedModel.addCell({{cell_type: 'code', source}}); }}", source
        )

    def delete_cell(self, index: int) -> None:
        self.page.evaluate(f"index => {{ {CURRENT} panel.content.model.sharedModel.deleteCell(index); }}", index)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the tab during the block, as the browser does with tabs in the background: no code runs in it."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("Page.setWebLifecycleState", {"state": "frozen"})
        yield
        session.send("Page.setWebLifecycleState", {"state": "active"})
        session.detach()

    @contextmanager
    def disconnected(self) -> Iterator[None]:
        """Close the connection to the kernel during the block; messages of the page wait."""
        kernel = f"{CURRENT} const kernel = panel.sessionContext.session.kernel;"
        self.page.evaluate(f"() => {{ {kernel} kernel._clearSocket(); kernel._updateConnectionStatus('connecting'); }}")
        yield
        self.page.evaluate(f"async () => {{ {kernel} await kernel.reconnect(); }}")

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Lose the kernel's messages during the block, as in a connection that breaks."""
        socket = f"{CURRENT} const socket = panel.sessionContext.session.kernel._ws;"
        self.page.evaluate(f"() => {{ {socket} socket.heard = socket.onmessage; socket.onmessage = () => 0; }}")
        yield
        self.page.evaluate(f"() => {{ {socket} socket.onmessage = socket.heard; }}")

    def forgive(self, text: str) -> None:
        """Remove complaints with this text, which JupyterLab itself writes because of the test."""
        self.page.evaluate("0")
        self.complaints = [each for each in self.complaints if text not in each]

    def save(self) -> None:
        self.command("docmanager:save")

    def restart(self) -> None:
        """Restart the kernel, and wait until it is ready."""
        self.page.evaluate(f"async () => {{ {CURRENT} await panel.sessionContext.restartKernel(); }}")

    def close_notebook(self) -> None:
        """Close the notebook without saving, and stop its kernel."""
        self.page.evaluate(
            f"""async () => {{ {CURRENT}
                await panel.sessionContext.shutdown();
                panel.context.model.dirty = false;
                panel.dispose();
            }}"""
        )

    @contextmanager
    def watched(self) -> Iterator[list[Message]]:
        """Collect the kernel's messages during the block."""
        first = len(self.messages)
        watched: list[Message] = []
        yield watched
        watched += self.messages[first:]

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Let the page run until the condition is true, and return its value."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while time.monotonic() < deadline:
            if value := condition():
                return value
            self.page.wait_for_timeout(20)
        raise AssertionError(f"in {WAIT_MS / 1000:g} s it has not come about that {what}")

    def close(self) -> None:
        self.page.close()


def updates(messages: Sequence[Message]) -> Counter[str]:
    """Count the state messages of each widget."""
    return Counter(
        message["content"]["comm_id"]
        for _, message in messages
        if message["header"]["msg_type"] == "comm_msg" and message["content"]["data"].get("method") == "update"
    )


def seconds(messages: Sequence[Message]) -> float:
    """Return the time from the first to the last message by the kernel's clock; they may arrive late and together."""
    sent = [datetime.fromisoformat(message["header"]["date"]) for _, message in messages]
    return (max(sent) - min(sent)).total_seconds()


def kernel_message(frame: bytes) -> dict[str, Any] | None:
    """Return header and content of a message in binary form: the number of offsets, the offsets, the parts."""
    count = int.from_bytes(frame[:8], "little")
    at = [int.from_bytes(frame[8 * i : 8 * i + 8], "little") for i in range(1, count + 1)]
    if count < 5 or at[-1] != len(frame):
        return None
    parts = [frame[start:end] for start, end in pairwise(at)]
    return {"channel": parts[0].decode(), "header": json.loads(parts[1]), "content": json.loads(parts[4])}


LAUNCH = "import lmx_lab, os, time\nlab = lmx_lab.launch('tiny', port=0, loop={loop!r}, embedder='tiny-bert')"
SLEEP = "until = time.time() + 200\nwhile time.time() < until and not os.path.exists('awake'): time.sleep(0.05)"
"""A cell that sleeps until a file exists in the notebook's folder."""
SLEEPING = 2
"""Index of the cell that sleeps."""


def is_asleep(tab: Tab) -> bool:
    return bool(tab.cell(SLEEPING).locator(".jp-InputPrompt").inner_text() == "[*]:")


@contextmanager
def sleeping(tab: Tab) -> Iterator[None]:
    """Let the cell sleep during the block."""
    awake = tab.lab.folder / "awake"
    awake.unlink(missing_ok=True)
    tab.start(SLEEPING)
    try:
        tab.wait(lambda: is_asleep(tab), "the cell is running")
        yield
        assert is_asleep(tab)
    finally:
        awake.touch()


LONG_ANSWER = 20_000
"""Tokens of an answer that is still running when a test checks it."""


def ask(tab: Tab, text: str, *, max_tokens: int = 40) -> Locator:
    """After the end of the previous answer, type and send a message. Returns the panel when it displays the message."""
    chat = tab.panel("Chat")
    expect(chat.get_by_role("button", name="Send")).to_be_visible()
    count = chat.locator(".user").count()
    knobs = chat.locator("details", has_text="sampling")
    if not knobs.evaluate("node => node.open"):
        knobs.locator("summary").click()
    chat.get_by_label("max_tokens").fill(str(max_tokens))
    chat.get_by_label("message").focus()
    tab.page.keyboard.type(text)
    tab.page.keyboard.press("Enter")
    expect(chat.locator(".user")).to_have_count(count + 1)
    return chat


def ask_echo(tab: Tab, text: str) -> Locator:
    """Send a message in the chat panel, and return the panel when it shows the answer, which is the same text."""
    chat = tab.panel("Chat")
    count = chat.locator(".assistant").count()
    chat.get_by_label("message").fill(text)
    tab.page.keyboard.press("Enter")
    expect(chat.locator(".assistant")).to_have_count(count + 1)
    expect(chat.locator(".assistant .text:not(.dim)").last).to_have_text(text)
    expect(chat.get_by_role("button", name="Send")).to_be_visible()
    return chat


def drawn(tab: Tab) -> str:
    """Return the pixels of the first chart."""
    return str(tab.panel("Metrics").locator("canvas").first.evaluate("canvas => canvas.toDataURL()"))


def chart_moves(tab: Tab) -> None:
    before = drawn(tab)
    tab.wait(lambda: drawn(tab) != before, "the chart moves")


def model_row(tab: Tab, model: str) -> Locator:
    return tab.panel("Models").get_by_role("row").filter(has=tab.page.get_by_role("rowheader", name=model, exact=True))


def model_button(tab: Tab, name: str) -> Locator:
    return tab.panel("Models").get_by_role("button", name=name, exact=True)


QUERIES = (f"where is the cat, number {number}" for number in itertools.count())
"""A new query for each ranking, so that a test does not accept the result of an earlier one."""
DOCUMENTS = ["the dog runs", "the cat sits on the mat", "berlin is the capital of germany"]


def send_ranking(tab: Tab, documents: str, query: str) -> Locator:
    """Fill in the form, send it by keyboard, and return the panel."""
    rerank = tab.panel("Rerank")
    rerank.get_by_label("Query").fill(query)
    rerank.get_by_label("Documents").fill(documents)
    tab.page.keyboard.press("Control+Enter")
    return rerank


def rank(tab: Tab, documents: str) -> Locator:
    """Rank by keyboard, and return the panel when it displays the result."""
    query = next(QUERIES)
    rerank = send_ranking(tab, documents, query)
    expect(rerank.get_by_role("status").filter(has_text=re.compile(f"{query}$"))).to_be_visible()
    return rerank


MAX_UPDATES_PER_S = 4


def panel_names(tab: Tab) -> dict[str, str]:
    """Return the names of the panels by the ids of their comms."""
    printed = tab.kernel("print(*(f'{panel.comm.comm_id}={name}' for name, panel in lab.workbench.panels.items()))")
    return dict(pair.split("=") for pair in printed.split())


MIN_CONTRAST = 4.5
"""WCAG 2.2, 1.4.3, level AA."""
# Returns the contrast of each visible text to its background. Colours are painted on a canvas, to convert any notation
# to numbers and to blend translucent colours with the colours behind them.
CONTRASTS = """(root) => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const over = (below, color, opacity = 1) => {
        canvas.globalAlpha = 1;
        canvas.fillStyle = `rgb(${below.join()})`;
        canvas.fillRect(0, 0, 1, 1);
        canvas.globalAlpha = opacity;
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const ancestors = (node) => (node ? [...ancestors(node.parentElement), node] : []);
    const behind = (node) => ancestors(node).reduce(
        (below, each) => over(below, getComputedStyle(each).backgroundColor), [255, 255, 255]);
    const opacity = (node) => ancestors(node).reduce((all, each) => all * getComputedStyle(each).opacity, 1);
    const light = (color) => {
        const [r, g, b] = color.map((part) => part / 255).map((part) =>
            part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (node, style) => {
        const below = behind(node);
        const [dark, bright] = [light(below), light(over(below, style.color, opacity(node)))].sort((a, b) => a - b);
        return (bright + 0.05) / (dark + 0.05);
    };
    const found = [];
    const seen = (node) => {
        const {width, height} = node.getBoundingClientRect();
        return width > 1 && height > 1 && node.checkVisibility({visibilityProperty: true});
    };
    const note = (node, text, pseudo) => {
        const style = getComputedStyle(node, pseudo);
        if (text.trim() && seen(node)) found.push([text.trim().slice(0, 60), contrast(node, style)]);
    };
    for (const node of root.querySelectorAll("*")) {
        const own = [...node.childNodes].filter((each) => each.nodeType === 3).map((each) => each.data).join("");
        if (!node.matches("input, textarea, select")) note(node, own);
        else if (node.value) note(node, node.value);
        else note(node, node.placeholder ?? "", "::placeholder");
    }
    return found;
}"""
OVERFLOW = """(node) => {
    node.style.width = "400px";
    const over = node.scrollWidth - node.clientWidth;
    node.style.width = "";
    return over;
}"""
"""Returns by how many pixels the content of a panel that is 400 pixels wide is wider."""


def check_readable(tab: Tab, label: str, theme: str, open_details: Callable[[], None]) -> None:
    """Check in a theme that a panel is accessible, and its text readable, with its details and in 400 pixels."""
    panel = tab.panel(label)
    tab.theme(theme)
    try:
        open_details()
        violations = serious_violations(tab.page, ".jp-Notebook:not(.lm-mod-hidden) .lmx")
        contrasts = panel.first.evaluate(CONTRASTS)
        overflow = panel.first.evaluate(OVERFLOW)
    finally:
        tab.theme("light")
    assert violations == []
    assert len(contrasts) > 5
    assert {text: contrast for text, contrast in contrasts if contrast < MIN_CONTRAST} == {}
    assert overflow <= 0


NEXT_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
# Marks each visible control of a panel with its number in the order of the document, and returns their number.
MARK_CONTROLS = """(root) => {
    const controls = root.querySelectorAll("button, input, select, textarea, summary, [tabindex='0']");
    const visible = [...controls].filter((node) => node.checkVisibility() && !node.disabled);
    visible.forEach((node, number) => (node.dataset.number = number));
    visible[0].focus();
    return visible.length;
}"""
FOCUSED_CONTROL = """() => {
    const {dataset, tagName} = document.activeElement;
    return dataset.number === undefined ? null : [Number(dataset.number), tagName];
}"""
CONTROL = re.compile(r"- \'?(button|textbox|searchbox|combobox|checkbox|spinbutton)(?: \"([^\"]*))?", re.MULTILINE)
"""A control in a snapshot of the accessibility tree: its role and its name."""
OUTLINE = "getComputedStyle(document.activeElement).outlineStyle"


def tab_through(page: Page, root: Locator) -> int:
    """Check that Tab reaches all controls of an element in order, that each shows the focus and has a name.

    Returns:
        The number of controls.
    """
    count, reached = int(root.evaluate(MARK_CONTROLS)), list[int]()
    while (focused := page.evaluate(FOCUSED_CONTROL)) is not None and focused[0] not in reached:
        assert page.evaluate(OUTLINE) != "none", f"control {focused} shows no focus"
        reached.append(focused[0])
        page.keyboard.press("Tab")
    page.evaluate("() => document.querySelectorAll('[data-number]').forEach((it) => delete it.dataset.number)")
    assert reached == list(range(count))
    controls = CONTROL.findall(root.aria_snapshot())
    assert len(controls) >= 3
    assert [role for role, label in controls if not label] == []
    return count


SCRIPTED_EVENTS = """
import os, time
from lmx_lab.panels.layout import compose_panels
from lmx_lab.panels.workbench import Workbench
from lmx_lab.panels.event_log import GROUPS
from tests.support.panels import Flood, LIVE, ScriptedDaemon, ScriptedLog
from tests.support.panels import ScriptedBackend
bench, daemon = Workbench(ScriptedBackend()), ScriptedDaemon()
bench.follow_events(daemon)
async def put(*events):
    for event in events: daemon.given.put_nowait(event)
give = lambda *events: bench.submit(put(*events)).result(30)
"""
RESET_EVENTS = """
daemon, log = ScriptedDaemon(), ScriptedLog(f"log-{time.time_ns()}")
bench.follow_events(daemon)
panel = bench.panels["events"]
give(LIVE)
while not daemon.readers or panel.connection["state"] != "live": time.sleep(0.02)
bench.submit(panel.do_filter({"groups": list(GROUPS), "session": "", "text": ""})).result(30)
bench.submit(panel.do_clear({})).result(30)
"""
ALL_EVENTS = """
failed = {"code": "lmx-timeout", "message": "the model's server has not answered", "type": "x"}
call = {"call_id": "c", "name": "weather", "arguments": {"city": "Ulm"}}
end = {"call_id": "c", "name": "weather", "status": "error", "text": "no network", "truncated": False, "elapsed_s": 0.2}
give(log.created(), log.event("turn.started", {"model": "tiny"}), log.token("Let me see.", kind="turn.thinking"),
     *(log.token("It is sunny. ") for _ in range(20)), log.message("It is sunny."), log.event("tool.start", call),
     log.event("tool.end", end), log.event("daemon.unheard", {"of": 1}, session=None, turn=None),
     log.event("turn.error", {"error": failed, "text": "", "stats": None}, turn="turn-0"),
     ConnectionState(state="waiting", attempts=2, retry_in_s=2.0, error=UnreachableError("refused")),
     log.reset(500), log.snapshot(500, partial="It is"), LIVE, log.token(" sunny, and warm."), log.permission_request(),
     log.permission_request("per-2", tool="files__write", arguments={"path": "notes.txt", "text": "one\\ntwo"}))
"""
EVENT_IMPORTS = "from lmx_lab.client.subscription import ConnectionState\nfrom lmx_lab.errors import UnreachableError\n"
