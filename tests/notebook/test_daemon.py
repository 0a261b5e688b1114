"""Test the daemon of a lab: both start and stop together, and the daemon survives a new launch."""

import asyncio
import shutil
import sys
import threading
from contextlib import aclosing

import pytest

import lmx_lab
from lmx_lab.daemon.home import read_state
from lmx_lab.errors import DaemonRunningError, HostingError, InvalidRequestError
from lmx_lab.notebook.daemon import merge_events
from lmx_lab.settings import Settings
from tests.support.daemons import client, serving
from tests.support.mcp import COUNTING


@pytest.fixture
def options(tmp_path):
    return {"home": tmp_path, "port": 0, "daemon_port": 0, "daemon": True}


@pytest.fixture(autouse=True)
def _no_daemon_remains():
    yield
    if (lab := lmx_lab.current()) is not None:
        lab.stop()
    assert not [thread.name for thread in threading.enumerate() if thread.name == "lmx-lab-daemon"]


@pytest.mark.slow
def test_a_turn_of_the_daemon_uses_the_labs_model(options):
    lab = lmx_lab.launch("echo", api_key="key-of-the-lab", **options)

    @lab.daemon.tool
    def now() -> str:
        """Return the time."""
        return "noon"

    with client(lab.daemon) as http:
        http.post("/v3/sessions", json={"session_id": "s"})
        body = {"turn_id": "t", "content": "one two three four five", "overrides": {"max_tokens": 4, "tools": []}}
        assert http.post("/v3/sessions/s/turns", json=body).status_code == 202
        turn = http.get("/v3/sessions/s/turns/t", params={"wait": 20}).json()
        assert (turn["status"], turn["stop_reason"], turn["stats"]["tokens"]) == ("done", "length", 4), turn
        assert http.get("/v3/daemon").json()["upstream"]["url"] == lab.url
    assert lab.daemon.url in repr(lab)
    shown = repr(lab) + lab._repr_html_() + repr(vars(lab)) + repr(lab.daemon)
    assert lab.daemon.token not in shown
    assert "key-of-the-lab" not in shown
    folder, daemon = lab.daemon.folder, lab.daemon
    lab.stop()
    assert (lab.daemon, daemon.running, read_state(folder)) == (None, False, None)


@pytest.mark.slow
def test_a_launch_cell_that_is_run_again_keeps_the_daemon(options):
    lab = lmx_lab.launch(**options)
    daemon = lab.daemon
    assert lmx_lab.launch(**options).daemon is daemon
    assert lmx_lab.launch(**{**options, "daemon": False}).daemon is daemon
    daemon.stop()
    assert lab.daemon is None
    assert lab.running
    assert lmx_lab.launch(**options).daemon is not None


@pytest.mark.slow
def test_a_relaunched_lab_keeps_sessions_and_functions(options):
    lab = lmx_lab.launch(**options)

    @lab.daemon.tool
    def length(text: str) -> int:
        """Return the length of a text."""
        return len(text)

    with client(lab.daemon) as http:
        http.post("/v3/sessions", json={"session_id": "kept"})
    changed = lmx_lab.launch(slots=2, **options)
    assert changed is not lab
    assert lab.daemon is None
    assert changed.daemon.upstream_url == changed.url
    with client(changed.daemon) as http:
        assert http.get("/v3/sessions/kept").status_code == 200
        assert http.get("/v3/daemon").json()["counts"]["tools"] == 1
    changed.stop()
    new = lmx_lab.launch(**options)
    with client(new.daemon) as http:
        assert http.get("/v3/sessions/kept").status_code == 200
        assert http.get("/v3/daemon").json()["counts"]["tools"] == 0


def test_a_second_daemon_in_a_home_is_refused_and_the_lab_runs(options):
    with serving(options["home"]) as other:
        with pytest.raises(DaemonRunningError, match=other.url) as caught:
            lmx_lab.launch(**options)
        lab = lmx_lab.current()
        assert lab.url in str(caught.value)
        assert lab.daemon is None
        assert other.running


def test_leaving_the_context_of_a_lab_stops_its_daemon(options):
    async def run():
        settings = Settings(home=options["home"], port=0, daemon_port=0)
        async with lmx_lab.Lab(settings, loop="kernel") as lab:
            daemon = lab.start_daemon()
            assert daemon.running
            return daemon

    assert not asyncio.run(run()).running


@pytest.mark.anyio
async def test_merged_events_can_be_closed_while_the_buffer_is_full():
    async def many(name):
        while True:
            yield name

    async with asyncio.timeout(20), aclosing(merge_events(many("a"), many("b"), buffered=2)) as items:
        assert await anext(items) == "a"
        await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "lmx-lab merging"]


def test_methods_of_a_stopped_daemon_name_the_running_one(options):
    lab = lmx_lab.launch(**options)
    daemon = lab.daemon
    daemon.sessions()
    daemon.stop()
    with pytest.raises(HostingError, match=r"lab\.daemon .* lab\.start_daemon\(\)"):
        daemon.sessions()


def test_a_command_as_a_single_text_is_refused_with_the_list_to_use(options):
    lab = lmx_lab.launch(**options)
    with pytest.raises(InvalidRequestError, match=r"'python -m time'; .* \['python', '-m', 'time'\]"):
        lab.daemon.add_mcp_server("time", "python -m time")
    assert lab.daemon.client.mcp_servers() == []


# It imports MCP.
@pytest.mark.slow
def test_an_mcp_server_that_exists_gets_the_given_configuration(options):
    lab = lmx_lab.launch(**options)
    assert lab.daemon is not None
    given = {"enabled": False, "permission": "allow", "env": {"KEY": "secret"}, "tool_timeout_s": 5.0}
    assert lab.daemon.add_mcp_server("time", ["python", "-m", "time"], **given).permission == "allow"
    omitted = lab.daemon.add_mcp_server("time", ["python"], enabled=False)
    assert (omitted.permission, omitted.args, omitted.env, omitted.tool_timeout_s) == ("ask", (), {}, 60.0)
    other = lab.daemon.add_mcp_server("time", url="http://127.0.0.1:9/mcp", enabled=False)
    assert (other.transport, other.command, other.permission) == ("http", None, "ask")
    lab.daemon.remove_mcp_server("time")


@pytest.mark.slow
def test_python_in_a_command_is_the_python_of_the_kernel(options, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    lab = lmx_lab.launch(**options)
    added = lab.daemon.add_mcp_server(
        "counting", ["python", "-I", str(COUNTING), str(tmp_path / "calls"), "0"], wait=True
    )
    assert (added.state, added.command) == ("ready", sys.executable)
    assert [line.split()[:2] for line in repr(lab.daemon.mcp_servers()).splitlines()] == [
        ["name", "state"],
        ["counting", "ready"],
    ]

    @lab.daemon.tool(read_only=True)
    def noon() -> str:
        """Return the time. It is always noon."""
        return "noon"

    names = [tool.name for tool in lab.daemon.tools]
    assert names == sorted(names)
    assert {"noon", "counting__count"} <= set(names)
    assert "<td style='text-align:left'>Return the time. It is always noon.</td>" in lab.daemon.tools._repr_html_()


@pytest.mark.slow
def test_a_server_that_does_not_start_is_an_error_with_the_reason_and_can_be_added_again(options, tmp_path):
    lab = lmx_lab.launch(**options)
    server = tmp_path / "server.py"
    command = ["python", str(server), str(tmp_path / "calls"), "0"]
    with pytest.raises(HostingError, match=r"the MCP server late did not start: .*No such file") as caught:
        lab.daemon.add_mcp_server("late", command, wait=True)
    assert "lab.daemon.remove_mcp_server('late')" in str(caught.value)
    shutil.copy(COUNTING, server)
    assert lab.daemon.add_mcp_server("late", command, wait=True).state == "ready"


@pytest.mark.slow
def test_a_session_is_created_or_reopened_by_its_name(options):
    lab = lmx_lab.launch("echo", **options)
    session = lab.daemon.session("letters", title="Letters to Ann")
    assert repr(session) == f"<Session letters of {lab.daemon.url}, created>"
    session.run("one")
    again = lab.daemon.session("letters")
    assert repr(again).startswith(f"<Session letters of {lab.daemon.url}, reopened, last used 20")
    assert len(again.snapshot().messages) == 2
    header, row = repr(lab.daemon.sessions()).splitlines()
    assert header.split() == ["session_id", "title", "model", "status", "created_at", "updated_at"]
    assert row.startswith("letters     Letters to Ann  ")
    assert [record.session_id for record in lab.daemon.sessions(limit=1).sessions] == ["letters"]


@pytest.mark.slow
def test_a_remote_lab_has_no_daemon(options):
    with lmx_lab.launch(**options) as lab, lmx_lab.attach(lab.url) as attached:
        assert attached.daemon is None
