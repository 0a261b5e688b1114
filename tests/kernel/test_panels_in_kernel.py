"""Panels in real kernels without a browser: the messages of a frontend, with and without a cell in the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.kernel.conftest import Notebook

LAUNCH = "import lmx_lab, threading\nlab = lmx_lab.launch('tiny', port=0, loop={mode!r})\npanel = lab.panel('models')"
COMM = "print(panel.comm.comm_id)"
WAIT_S = 20
HELD = """
released = threading.Event()
print("started", flush=True)
assert released.wait(20)
print("released")
"""


@pytest.fixture(scope="module", params=["kernel", "thread"])
def running(request: pytest.FixtureRequest, tiny_home: Path) -> Iterator[Notebook]:
    from tests.kernel.conftest import Notebook

    notebook = Notebook(tiny_home)
    notebook.run(LAUNCH.format(mode=request.param))
    yield notebook
    notebook.close()


@pytest.fixture
def view(running: Notebook) -> View:
    running.run("if lab.engine.snapshot.model != 'tiny': lab.load('tiny')")
    return View(running)


class View:
    """What a frontend knows of a panel: its state, and the replies to what it asks."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.comm = notebook.run(COMM)
        self.state: dict[str, Any] = {}
        self.replies: list[dict[str, Any]] = []
        self.printed = ""

    def ask(self, subshell: str | None = None, **content: Any) -> None:
        client = self.notebook.client
        message = client.session.msg(
            "comm_msg", {"comm_id": self.comm, "data": {"method": "custom", "content": content}}
        )
        message["header"]["subshell_id"] = subshell
        client.shell_channel.send(message)

    def read(self, until: Any) -> None:
        """Take what the kernel publishes until the condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not until():
            message = self.notebook.client.get_iopub_msg(timeout=max(0, deadline - time.monotonic()))
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                self.printed += content["text"]
            if kind == "comm_msg" and content["comm_id"] == self.comm:
                data = content["data"]
                if data["method"] == "update":
                    self.state |= data["state"]
                elif data["method"] == "custom":
                    self.replies.append(data["content"])

    def reply(self, number: str) -> dict[str, Any]:
        """The reply with this id, and after it a further one, so that a second reply would have been seen."""
        self.read(lambda: any(reply["id"] == number for reply in self.replies))
        self.ask(id=f"after {number}", do="refresh")
        self.read(lambda: any(reply["id"] == f"after {number}" for reply in self.replies))
        (reply,) = [reply for reply in self.replies if reply["id"] == number]
        return reply

    def subshell(self) -> str:
        client = self.notebook.client
        message = client.session.msg("create_subshell_request", {})
        client.control_channel.send(message)
        while True:
            reply = client.get_control_msg(timeout=WAIT_S)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return str(reply["content"]["subshell_id"])


def test_a_request_has_exactly_one_reply(view: View) -> None:
    view.ask(id="1", do="load", model="tiny-two")
    assert view.reply("1")["ok"]
    view.read(lambda: (view.state.get("server") or {}).get("model") == "tiny-two")


def test_what_a_panel_cannot_do_and_what_makes_no_sense_is_refused_by_name(view: View) -> None:
    view.ask(id="a", do="explode")
    view.ask(id="b", do="load", model=7)
    view.ask(id="c", do="load")
    view.ask(do="load", model="tiny")
    refused = [view.reply(number) for number in "abc"]
    assert [reply["error"]["code"] for reply in refused] == ["invalid-request"] * 3
    assert "explode" in refused[0]["error"]["message"]


def test_unload_works_while_a_cell_blocks(view: View) -> None:
    subshell = view.subshell()
    notebook = view.notebook
    notebook.start(HELD)
    view.read(lambda: "started" in view.printed)
    view.ask(subshell, id="1", do="unload", model="tiny")
    view.read(lambda: view.state.get("server", {}).get("model", "tiny") is None)
    assert [reply["ok"] for reply in view.replies] == [True]
    assert "released" not in view.printed
    # The cell ends only now: everything above came while it blocked.
    notebook.manager.interrupt_kernel()
    notebook.client.get_shell_msg(timeout=WAIT_S)


def test_the_launch_cell_again_gives_the_same_lab_port_and_panel(view: View) -> None:
    notebook = view.notebook
    mode = notebook.run("print(lab.place)")
    loop = "thread" if "thread" in mode else "kernel"
    before = notebook.run("before = lab, panel; print(lab.port)")
    assert notebook.run(LAUNCH.format(mode=loop) + "\nprint(lab.port)") == before
    assert notebook.run("print(before[0] is lab, before[1] is panel, panel is lab.panel('models'))") == "True True True"


def test_a_stopped_server_is_said_and_the_next_one_is_shown(view: View) -> None:
    notebook = view.notebook
    loop = "thread" if "thread" in notebook.run("print(lab.place)") else "kernel"
    notebook.start("lab.stop()")
    view.read(lambda: view.state.get("server", {}).get("state") == "stopped")
    assert "run the launch cell again" in view.state["server"]["note"]
    notebook.start(LAUNCH.format(mode=loop))
    view.read(lambda: view.state["server"]["state"] == "running" and view.state["server"]["model"] == "tiny")
