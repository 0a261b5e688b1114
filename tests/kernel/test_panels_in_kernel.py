"""Test panels in real kernels without a browser, by the messages of a frontend, while cells run and while none runs."""

import pytest

from tests.support.kernels import WAIT_S, Notebook

LAUNCH = "import lmx_lab, threading\nlab = lmx_lab.launch('tiny', port=0, loop={mode!r})\npanel = lab.panel('models')"
HELD = """
released = threading.Event()
print("started", flush=True)
print("released", released.wait(60))
"""


@pytest.fixture(scope="module", params=["kernel", "thread"])
def running(request, tiny_home):
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

    def __init__(self, notebook):
        self.client, self.run, self.read = notebook.client, notebook.run, notebook.until
        self.comm = ""
        self.state = {}
        self.replies = []
        notebook.on_comm = self._receive

    def _receive(self, comm, data):
        if comm == self.comm and data["method"] == "update":
            self.state |= data["state"]
        elif comm == self.comm and data["method"] == "custom":
            self.replies.append(data["content"])

    def ask(self, *, subshell=None, **content):
        self.send(subshell, method="custom", content=content)

    def send(self, subshell=None, **data):
        self._send("comm_msg", subshell, comm_id=self.comm, data=data)

    def _send(self, kind, subshell, **content):
        message = self.client.session.msg(kind, content)
        message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)

    def reply(self, number):
        """Return the only reply with this id. A second one would arrive before the reply to the next request."""
        after = f"after {number}"
        self.ask(id=after, do="refresh")
        self.read(lambda: {number, after} <= {reply["id"] for reply in self.replies})
        (reply,) = [reply for reply in self.replies if reply["id"] == number]
        return reply

    def server(self, name):
        return self.state.get("server", {}).get(name)

    def execute(self, subshell, code):
        """Run code while a cell runs."""
        rest = {"silent": True, "store_history": False, "user_expressions": {}, "allow_stdin": False}
        self._send("execute_request", subshell, code=code, **rest)

    def subshell(self):
        """Open a subshell, as JupyterLab does for the messages of widgets."""
        message = self.client.session.msg("create_subshell_request", {})
        self.client.control_channel.send(message)
        while True:
            reply = self.client.get_control_msg(timeout=WAIT_S)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return reply["content"]["subshell_id"]


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


def test_unload_works_while_a_cell_blocks(view, running):
    subshell = view.subshell()
    cell = running.start(HELD)
    view.read(lambda: "started" in cell.text)
    view.ask(subshell=subshell, id="1", do="unload", model="tiny")
    # The panel refuses a load until the job of the unload has ended, shortly after the model was unloaded.
    view.read(lambda: view.replies and view.server("model") is None and not view.state["jobs"])
    assert [reply["ok"] for reply in view.replies] == [True]
    assert "released" not in cell.text
    view.ask(subshell=subshell, id="2", do="load", model="tiny")
    view.read(lambda: view.replies[1:] and (view.server("model") == "tiny" or not view.replies[1]["ok"]))
    assert [reply["ok"] for reply in view.replies] == [True, True], view.replies
    assert "released" not in cell.text
    view.execute(subshell, "released.set()")
    view.read(lambda: cell.ended)
    assert "released True" in cell.text


def test_the_launch_cell_again_gives_the_same_lab_port_and_panel(view, running):
    port = view.run("before = lab, panel; print(lab.server.port)")
    assert view.run(LAUNCH.format(mode=running.mode) + "\nprint(lab.server.port)") == port
    assert view.run("print(before[0] is lab is lmx_lab.current(), before[1] is panel)") == "True True"
    assert view.run("print(lab.server.engine.snapshot.model)") == "tiny"


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
