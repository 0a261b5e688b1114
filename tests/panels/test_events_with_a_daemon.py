"""Test the events panel with a real daemon: turns, tools, permissions, and the buttons of the panel."""

import pytest

from lmx_lab.notebook.daemon import LabEvents
from lmx_lab.panels.events import EventsPanel
from tests.support.daemons import client, serving
from tests.support.model_server import STALL, Scripted, calls, says, token
from tests.support.panels import Reader

pytestmark = pytest.mark.slow


def answer(body):
    """Return the answer to the last message."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return says("It is ", "gone.")
    if last["content"] == "Delete it.":
        return calls(("delete", {"path": "notes.txt"}))
    return [token("Once upon "), token("a time"), STALL]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Scripted(answer) as upstream, serving(tmp_path_factory.mktemp("daemon"), upstream=upstream.url) as daemon:
        yield daemon


@pytest.fixture
def http(daemon):
    with client(daemon) as http:
        yield http


@pytest.fixture
def reader(workbench, daemon):
    workbench.follow_events(LabEvents(daemon))
    reader = Reader(EventsPanel(workbench))
    reader.until(lambda panel: panel.connection["state"] == "live")
    return reader


def test_a_tool_waits_until_the_panel_allows_it(reader, daemon, http):
    deleted = []

    @daemon.tool
    def delete(path: str) -> str:
        """Delete a file."""
        deleted.append(path)
        return "gone"

    session = http.post("/v3/sessions", json={"title": "Tidy"}).json()["session_id"]
    reader.ask("filter", session=session)
    http.post(f"/v3/sessions/{session}/turns", json={"content": "Delete it."}).raise_for_status()
    reader.until(lambda panel: panel.permissions)
    (permission,) = reader.panel.permissions
    assert (permission["tool"], permission["session"], '"notes.txt"' in permission["arguments"]) == (
        "delete",
        "Tidy",
        True,
    )
    assert deleted == []
    reader.ask("decide", permission=permission["id"], decision="allow", scope="once")
    reader.until(lambda panel: panel.live["status"] == "idle" and panel.live["text"].endswith("It is gone."))
    assert deleted == ["notes.txt"]
    assert reader.panel.permissions == []
    seen = [row["kind"] for row in reader.panel.frame["rows"] if row["kind"] != "turn.progress"]
    assert seen[:2] == ["session.created", "turn.queued"]
    assert seen[-1] == "turn.done"
    assert {"permission.request", "permission.resolved", "tool.start", "tool.end", "turn.token"} <= set(seen)
    assert reader.panel.df["seq"].dropna().is_monotonic_increasing


def test_stop_cancels_an_endless_turn(reader, http):
    session = http.post("/v3/sessions", json={}).json()["session_id"]
    reader.ask("filter", session=session)
    http.post(f"/v3/sessions/{session}/turns", json={"content": "Tell a story."}).raise_for_status()
    reader.until(lambda panel: panel.live.get("text") == "Once upon a time")
    reader.ask("cancel", session=session)
    reader.until(lambda panel: panel.live["status"] == "idle" and "cancelled" in panel.live["activity"])
