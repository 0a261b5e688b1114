"""Tests of turns with SmolLM2, a reference MCP server and a Python function, through the API of the daemon."""

from __future__ import annotations

import sys

import pytest

from lmx_lab.daemon.daemon import Daemon
from lmx_lab.notebook import Lab
from lmx_lab.settings import Settings
from tests.support.daemons import check_log, client

pytestmark = pytest.mark.long

TIME = {"name": "time", "command": sys.executable, "args": ["-m", "mcp_server_time", "--local-timezone", "UTC"]}


@pytest.fixture(scope="module")
def daemon(smollm2, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with Lab(Settings(home=home, port=0), loop="thread") as lab:
        lab.load(smollm2.path)
        daemon = Daemon(settings=Settings(home=home, daemon_port=0), upstream_url=lab.url)
        daemon.start()
        try:
            yield daemon
        finally:
            daemon.stop()


def turn(daemon, session_id, content, **overrides):
    body = {"content": content, "overrides": {"max_tokens": 48, "temperature": 0, **overrides}}
    with client(daemon) as http:
        accepted = http.post(f"/v3/sessions/{session_id}/turns", json=body)
        assert accepted.status_code == 202, accepted.text
        address = f"/v3/sessions/{session_id}/turns/{accepted.json()['turn_id']}"
        while (record := http.get(address, params={"wait": 5}).json())["ended_at"] is None:
            pass
    assert record["status"] == "done", record
    return dict(record)


def events(daemon, session_id):
    with client(daemon) as http:
        found = http.get(f"/v3/sessions/{session_id}/events", params={"after": 0}).json()["events"]
    check_log(found)
    return list(found)


def test_a_real_model_calls_a_tool_of_a_reference_server_and_continues(daemon):
    with client(daemon) as http:
        assert http.post("/v3/mcp/servers", json={**TIME, "permission": "allow"}).status_code == 201
        http.post("/v3/sessions", json={"session_id": "times", "tools": ["time__*"]})
    daemon.run(daemon.services.toolbox.wait_started(), 60)
    record = turn(daemon, "times", "What time is it in UTC?", tool_choice="time__get_current_time", max_steps=2)
    assert (record["stats"]["tool_calls"], record["stats"]["steps"]) == (1, 2)
    happened = events(daemon, "times")
    (started,) = [event["data"] for event in happened if event["event"] == "tool.start"]
    assert started["name"] == "time__get_current_time"
    assert isinstance(started["arguments"]["timezone"], str)
    (ended,) = [event["data"] for event in happened if event["event"] == "tool.end"]
    # The small model may choose an invalid time zone, which is an error of the server.
    assert ended["status"] in ("ok", "error")
    assert "timezone" in ended["text"].lower()
    follow = turn(daemon, "times", "Thank you. Say hello.", tools=[])
    assert follow["text"]


def test_a_real_model_calls_a_python_function_after_it_was_allowed(daemon):
    seen = []

    @daemon.tool
    def remember(word: str) -> str:
        """Remember a word.

        Args:
            word: Any word.
        """
        seen.append(word)
        return f"remembered {word}"

    with client(daemon) as http:
        http.post("/v3/sessions", json={"session_id": "words", "tools": ["remember"]})
        body = {
            "turn_id": "t",
            "content": "Remember the word salt.",
            "overrides": {"max_tokens": 48, "temperature": 0, "tool_choice": "remember"},
        }
        assert http.post("/v3/sessions/words/turns", json=body).status_code == 202
        cursor = 0
        requests = []
        while not requests:
            page = http.get("/v3/events", params={"after": cursor, "wait": 5, "types": "permission.request"}).json()
            requests, cursor = page["events"], page["cursor"]
        permission = requests[0]["data"]["permission"]
        assert seen == []
        assert http.get("/v3/sessions/words").json()["status"] == "waiting"
        decided = http.post(f"/v3/permissions/{permission['permission_id']}", json={"decision": "allow"})
        assert decided.json()["resolved_by"] == "client"
        while (record := http.get("/v3/sessions/words/turns/t", params={"wait": 5}).json())["ended_at"] is None:
            pass
    assert seen == [permission["arguments"]["word"]]
    assert record["status"] == "done"
    kinds = [event["event"] for event in events(daemon, "words")]
    assert kinds.index("permission.resolved") < kinds.index("tool.start") < kinds.index("tool.end")
