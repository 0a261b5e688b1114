"""Test panels in real kernels without a browser, by the messages of a frontend, while cells run and while none runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.kernels import Notebook

LAUNCH = "import lmx_lab, threading\nlab = lmx_lab.launch('tiny', port=0, loop={mode!r})\npanel = lab.panel('models')"
WAIT_S = 60
HELD = """
released = threading.Event()
print("started", flush=True)
print("released", released.wait(60))
"""


@pytest.fixture(scope="module", params=["kernel", "thread"])
def running(request, tiny_home):
    from tests.support.kernels import Notebook

    notebook = Notebook(tiny_home)
    notebook.mode = request.param
    yield notebook
    notebook.close()


@pytest.fixture
def view(running):
    """A view of the models panel; ``tiny`` is loaded."""
    view = View(running)
    view.run(LAUNCH.format(mode=running.mode))
    view.comm = view.run("print(panel.comm.comm_id)")
    view.send(method="request_state")
    view.read(lambda: view.server("model") == "tiny")
    return view


class View:
    """A panel as a frontend has it: its state, and the replies to requests."""

    def __init__(self, notebook: Notebook) -> None:
        self.client = notebook.client
        self.comm = ""
        self.state: dict[str, Any] = {}
        self.replies: list[dict[str, Any]] = []
        self.printed: dict[str, str] = {}
        self.idle: set[str] = set()

    def start(self, code: str) -> str:
        """Run a cell without waiting, and return its number."""
        return str(self.client.execute(code, store_history=False))

    def run(self, code: str) -> str:
        """Return the printed text of a cell."""
        cell = self.start(code)
        self.read(lambda: cell in self.idle)
        return self.printed.get(cell, "").strip()

    def ask(self, *, subshell: str | None = None, **content: Any) -> None:
        self.send(subshell, method="custom", content=content)

    def send(self, subshell: str | None = None, **data: Any) -> None:
        message = self.client.session.msg("comm_msg", {"comm_id": self.comm, "data": data})
        message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)

    def read(self, until: Callable[[], Any]) -> None:
        """Process the kernel's messages until the condition is true."""
        deadline = time.monotonic() + WAIT_S
        while not until():
            self._take(self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic())))

    def _take(self, message: dict[str, Any]) -> None:
        kind, content, parent = message["msg_type"], message["content"], message["parent_header"].get("msg_id", "")
        assert kind != "error", content
        if kind == "stream":
            self.printed[parent] = self.printed.get(parent, "") + content["text"]
        elif kind == "status" and content["execution_state"] == "idle":
            self.idle.add(parent)
        elif kind == "comm_msg" and content["comm_id"] == self.comm:
            data = content["data"]
            if data["method"] == "update":
                self.state |= data["state"]
            elif data["method"] == "custom":
                self.replies.append(data["content"])

    def reply(self, number: str) -> dict[str, Any]:
        """Return the only reply with this id. A second one would arrive before the reply to the next request."""
        after = f"after {number}"
        self.ask(id=after, do="refresh")
        self.read(lambda: {number, after} <= {reply["id"] for reply in self.replies})
        (reply,) = [reply for reply in self.replies if reply["id"] == number]
        return reply

    def server(self, name: str) -> Any:
        return self.state.get("server", {}).get(name)

    def execute(self, subshell: str, code: str) -> None:
        """Run code while a cell runs."""
        content = {"code": code, "silent": True, "store_history": False, "user_expressions": {}, "allow_stdin": False}
        message = self.client.session.msg("execute_request", content)
        message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)

    def subshell(self) -> str:
        """Open a subshell, as JupyterLab does for the messages of widgets."""
        message = self.client.session.msg("create_subshell_request", {})
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=WAIT_S)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return str(reply["content"]["subshell_id"])


@pytest.mark.long
def test_a_request_has_exactly_one_reply(view):
    view.ask(id="1", do="load", model="tiny-two")
    assert view.reply("1")["ok"]
    view.read(lambda: view.server("model") == "tiny-two")


def test_unknown_and_invalid_requests_are_refused(view):
    view.ask(do="load", model="tiny-two")
    view.ask(id="a", do="explode")
    view.ask(id="b", do="load", model=7)
    view.ask(id="c", do="load")
    refused = [view.reply(number) for number in "abc"]
    assert [reply["error"]["code"] for reply in refused] == ["invalid-request"] * 3
    assert "explode" in refused[0]["error"]["message"]
    assert view.run("print(lab.server.engine.snapshot.model)") == "tiny"


def test_unload_works_while_a_cell_blocks(view):
    subshell = view.subshell()
    cell = view.start(HELD)
    view.read(lambda: "started" in view.printed.get(cell, ""))
    view.ask(subshell=subshell, id="1", do="unload", model="tiny")
    # The panel refuses a load until the job of the unload has ended, shortly after the model was unloaded.
    view.read(lambda: view.replies and view.server("model") is None and not view.state["jobs"])
    assert [reply["ok"] for reply in view.replies] == [True]
    assert "released" not in view.printed[cell]
    view.ask(subshell=subshell, id="2", do="load", model="tiny")
    view.read(lambda: view.replies[1:] and (view.server("model") == "tiny" or not view.replies[1]["ok"]))
    assert [reply["ok"] for reply in view.replies] == [True, True], view.replies
    assert "released" not in view.printed[cell]
    view.execute(subshell, "released.set()")
    view.read(lambda: cell in view.idle)
    assert "released True" in view.printed[cell]


def test_the_launch_cell_again_gives_the_same_lab_port_and_panel(view, running):
    port = view.run("before = lab, panel; print(lab.server.port)")
    assert view.run(LAUNCH.format(mode=running.mode) + "\nprint(lab.server.port)") == port
    assert view.run("print(before[0] is lab, before[1] is panel)") == "True True"


def test_a_panel_shows_that_the_server_was_stopped_and_then_the_next_one(view, running):
    view.run("before = panel\nlab.stop()")
    view.read(lambda: view.server("state") == "stopped")
    assert "run the launch cell again" in view.server("note")
    view.ask(id="1", do="load", model="tiny")
    view.read(lambda: view.replies)
    assert view.replies[0]["error"]["code"]
    view.run(LAUNCH.format(mode=running.mode))
    view.read(lambda: view.server("state") == "running" and view.server("model") == "tiny")
    assert view.run("print(before is panel)") == "True"
