"""The JSON routes that need no model: shapes, codes, strictness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from lmx_lab.daemon.daemon import Daemon
from lmx_lab.daemon.limits import Limits
from tests.daemon.face import client, serving


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(tmp_path_factory.mktemp("home"), Limits(wait_s=5.0), max_body_bytes=100_000) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def http(daemon: Daemon) -> Iterator[httpx2.Client]:
    with client(daemon) as http:
        yield http


@pytest.fixture
def session(http: httpx2.Client) -> Iterator[str]:
    session_id = http.post("/v3/sessions", json={"title": "One"}).json()["session_id"]
    yield session_id
    assert http.delete(f"/v3/sessions/{session_id}").status_code == 204


def refused(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert error["request_id"] == answer.headers["x-request-id"]
    return error


# --- sessions


def test_a_session_is_created_once_for_an_id(http: httpx2.Client) -> None:
    body = {"session_id": "mine", "title": "First", "metadata": {"a": [1]}}
    made = http.post("/v3/sessions", json=body)
    again = http.post("/v3/sessions", json={"session_id": "mine", "title": "Second"})
    assert (made.status_code, again.status_code) == (201, 200)
    assert again.json() == made.json()
    assert (made.json()["title"], made.json()["metadata"], made.json()["status"]) == ("First", {"a": [1]}, "idle")
    assert [http.delete("/v3/sessions/mine").status_code for _ in range(2)] == [204, 204]
    refused(http.get("/v3/sessions/mine"), 404, "session-not-found")


def test_a_session_can_be_created_without_a_body(http: httpx2.Client) -> None:
    made = http.post("/v3/sessions")
    assert made.status_code == 201
    assert http.delete(f"/v3/sessions/{made.json()['session_id']}").status_code == 204


def test_a_session_is_changed_only_at_its_current_revision(http: httpx2.Client, session: str) -> None:
    changed = http.patch(f"/v3/sessions/{session}", json={"title": "Two", "revision": 1})
    assert (changed.json()["title"], changed.json()["revision"]) == ("Two", 2)
    refused(http.patch(f"/v3/sessions/{session}", json={"title": "Three", "revision": 1}), 409, "revision-conflict")
    assert http.get(f"/v3/sessions/{session}").json()["title"] == "Two"


def test_a_fork_has_the_messages_and_names_its_origin(http: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    session = http.post("/v3/sessions", json=body).json()["session_id"]
    fork = http.post(f"/v3/sessions/{session}/fork")
    assert (fork.status_code, fork.json()["forked_from"]) == (201, session)
    shown = http.get(f"/v3/sessions/{fork.json()['session_id']}").json()
    assert [message["content"] for message in shown["messages"]] == ["hi", "hello"]
    refused(http.post(f"/v3/sessions/{session}/fork", json={"through_turn_id": "none"}), 404, "turn-not-found")


def test_sessions_are_listed_in_pages(http: httpx2.Client) -> None:
    made = [http.post("/v3/sessions", json={"title": f"listed {n}"}).json()["session_id"] for n in range(5)]
    found: list[str] = []
    parameters: dict[str, Any] = {"limit": 2, "q": "LISTED"}
    while True:
        page = http.get("/v3/sessions", params=parameters).json()
        found += [session["session_id"] for session in page["sessions"]]
        if (cursor := page["next_cursor"]) is None:
            break
        parameters["cursor"] = cursor
    assert found == made[::-1]
    http.patch(f"/v3/sessions/{made[0]}", json={"archived": True})
    archived = http.get("/v3/sessions", params={"archived": "true", "q": "listed"}).json()["sessions"]
    assert [session["session_id"] for session in archived] == made[:1]


def test_events_continue_from_the_cursor_of_a_snapshot(http: httpx2.Client, session: str) -> None:
    cursor = http.get(f"/v3/sessions/{session}").json()["cursor"]
    http.patch(f"/v3/sessions/{session}", json={"title": "Later"})
    page = http.get(f"/v3/sessions/{session}/events", params={"after": cursor}).json()
    assert [event["event"] for event in page["events"]] == ["session.updated"]
    assert page["events"][0]["data"]["session"]["title"] == "Later"


# --- what is not there

WEIRD = ["none", "x" * 300, "a b", "..", "%", "'; DROP TABLE sessions; --", "ä", "\x00", "*", "\u202e"]


@pytest.mark.parametrize("name", WEIRD)
def test_ids_that_do_not_exist_are_not_found_whatever_their_characters(
    http: httpx2.Client, session: str, name: str
) -> None:
    part = quote(name, safe="") if name != ".." else "%2e%2e"
    for method, path, code in (
        ("GET", f"/v3/sessions/{part}", "session-not-found"),
        ("PATCH", f"/v3/sessions/{part}", "session-not-found"),
        ("GET", f"/v3/sessions/{part}/events", "session-not-found"),
        ("POST", f"/v3/sessions/{part}/cancel", "session-not-found"),
        ("GET", f"/v3/sessions/{session}/turns/{part}", "turn-not-found"),
        ("POST", f"/v3/sessions/{session}/turns/{part}/cancel", "turn-not-found"),
        ("GET", f"/v3/mcp/servers/{part}", "mcp-server-not-found"),
    ):
        answer = http.request(method, path, json={} if method == "PATCH" else None)
        if answer.request.url.path.endswith(".."):
            continue  # the client has taken it for a way up
        refused(answer, 404, code)
    decision = {"decision": "allow"}
    refused(http.post(f"/v3/permissions/{part}", json=decision), 404, "permission-not-found")
    assert http.delete(f"/v3/mcp/servers/{part}").status_code == 204
    assert http.get("/v3/sessions").status_code == 200


def test_an_unknown_route_refers_to_the_openapi_document(http: httpx2.Client) -> None:
    assert "/v3/openapi.json" in refused(http.get("/v3/nothing"), 404, "invalid-request")["message"]
    assert refused(http.put("/v3/sessions"), 405, "invalid-request")


# --- strictness


JUNK = ["", " 5", "5 ", "+5", "-1", "5_0", "5.0", "0x5", "1e3", "\u0665", "five", "9" * 17, "null"]


@pytest.mark.parametrize("junk", JUNK)
def test_numbers_accept_only_digits(http: httpx2.Client, junk: str) -> None:
    for path, name in (("/v3/events", "after"), ("/v3/events", "limit"), ("/v3/sessions", "limit")):
        assert refused(http.get(path, params={name: junk}), 400, "invalid-request")["param"] == name


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/v3/events", "limit=0", "limit"),
        ("/v3/events", "limit=501", "limit"),
        ("/v3/sessions", "limit=2001", "limit"),
        ("/v3/sessions", "cursor=junk", "cursor"),
        ("/v3/sessions", "archived=1", "archived"),
        ("/v3/events", "wait=nan", "wait"),
        ("/v3/events", "wait=inf", "wait"),
        ("/v3/events", "wait=6", "wait"),
        ("/v3/sessions/none/turns/none", "wait=6", "wait"),
        ("/v3/events", "types=turn.tokens", "types"),
        ("/v3/events", "types=turn.token,", "types"),
        ("/v3/events", "types=stream.hello", "types"),
        ("/v3/events", "types=turn.to*", "types"),
        ("/v3/events", "session_id=a%20b", "session_id.0"),
        ("/v3/events", "after=1&after=2", "after"),
        ("/v3/events", "After=1", "After"),
        ("/v3/events", "token=x", "token"),
        ("/v3/daemon", "x=1", "x"),
        ("/v3/health", "x=1", "x"),
        ("/v3/mcp/servers", "limit=1", "limit"),
    ],
)
def test_the_error_names_an_invalid_or_unknown_parameter(
    http: httpx2.Client, path: str, query: str, param: str
) -> None:
    assert refused(http.get(f"{path}?{query}"), 400, "invalid-request")["param"] == param


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b'{"titel": "x"}', "application/json", 400, "invalid-request"),
        (b'{"title": 5}', "application/json", 400, "invalid-request"),
        (b'{"title": "x"', "application/json", 400, "invalid-request"),
        (b'{"title": "\xff"}', "application/json", 400, "invalid-request"),
        (b'{"title": NaN}', "application/json", 400, "invalid-request"),
        (b"[]", "application/json", 400, "invalid-request"),
        (b'{"metadata": {"a": ' + b"[" * 100 + b"]" * 100 + b"}}", "application/json", 400, "invalid-request"),
        (b'{"title": "x"}', "text/plain", 400, "invalid-request"),
        (b'{"title": "' + b"x" * 100_000 + b'"}', "application/json", 413, "body-too-large"),
        (b"[" * 70_000, "application/json", 413, "body-too-large"),
        (
            b"{" + b",".join(b'"a%d": 1' % number for number in range(300)) + b"}",
            "application/json",
            400,
            "invalid-request",
        ),
        (b'{"session_id": "a b"}', "application/json", 400, "invalid-request"),
    ],
)
def test_an_invalid_body_is_refused(http: httpx2.Client, content: bytes, kind: str, status: int, code: str) -> None:
    before = http.get("/v3/daemon").json()["counts"]["sessions"]
    refused(http.post("/v3/sessions", content=content, headers={"content-type": kind}), status, code)
    assert http.get("/v3/daemon").json()["counts"]["sessions"] == before


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PATCH", "/v3/sessions/none"),
        ("POST", "/v3/sessions/none/fork"),
        ("POST", "/v3/sessions/none/turns"),
        ("POST", "/v3/sessions/none/cancel"),
        ("POST", "/v3/permissions/none"),
        ("POST", "/v3/mcp/servers"),
        ("POST", "/v3/mcp/test"),
        ("PATCH", "/v3/mcp/servers/none"),
        ("POST", "/v3/daemon/shutdown"),
    ],
)
def test_no_route_accepts_unknown_fields(http: httpx2.Client, method: str, path: str) -> None:
    refused(http.request(method, path, json={"no_such_field": 1}), 400, "invalid-request")


# --- events by polling


def test_polling_continues_from_its_cursor(http: httpx2.Client, session: str) -> None:
    start = http.get("/v3/events").json()["cursor"]
    for title in "abc":
        http.patch(f"/v3/sessions/{session}", json={"title": title})
    first = http.get("/v3/events", params={"after": start, "limit": 2}).json()
    rest = http.get("/v3/events", params={"after": first["cursor"], "limit": 2}).json()
    titles = [event["data"]["session"]["title"] for event in [*first["events"], *rest["events"]]]
    assert (titles, first["more"], rest["more"]) == (["a", "b", "c"], True, False)
    nothing = http.get("/v3/events", params={"after": rest["cursor"]}).json()
    assert nothing == {"events": [], "cursor": rest["cursor"], "more": False}


def test_a_waiting_poll_receives_the_event_when_it_occurs(http: httpx2.Client, daemon: Daemon, session: str) -> None:
    start = http.get("/v3/events").json()["cursor"]
    with client(daemon) as other:
        import threading

        answers: list[Any] = []
        parameters = {"after": start, "wait": 5, "types": "session.updated"}
        waiting = threading.Thread(target=lambda: answers.append(other.get("/v3/events", params=parameters).json()))
        waiting.start()
        http.post("/v3/sessions", json={"title": "not of this kind"})
        http.patch(f"/v3/sessions/{session}", json={"title": "awaited"})
        waiting.join()
    assert [event["data"]["session"]["title"] for event in answers[0]["events"]] == ["awaited"]


@pytest.mark.parametrize("wait", ["0.05", "5e-2", "0.0123456789"])
def test_a_waiting_poll_returns_after_its_time(http: httpx2.Client, wait: str) -> None:
    answer = http.get("/v3/events", params={"wait": wait}).json()
    assert answer["events"] == []


def test_cursors_that_cannot_be_resumed_are_refused(http: httpx2.Client) -> None:
    refused(http.get("/v3/events", params={"after": 10**9}), 410, "cursor-expired")
    refused(http.get("/v3/events", params={"after": 0, "stream_id": "stm_other"}), 410, "cursor-expired")
    assert http.get("/v3/events", params={"after": 0}).status_code == 200


# --- the daemon


def test_the_state_of_the_daemon_contains_ids_and_limits(http: httpx2.Client, daemon: Daemon) -> None:
    shown = http.get("/v3/daemon").json()
    assert (shown["daemon_id"], shown["upstream"]["url"]) == (daemon.daemon_id, daemon.upstream_url)
    assert shown["limits"]["wait_s"] == 5.0
    assert shown["latest_seq"] >= shown["oldest_seq"] == 1
    assert shown["counts"]["subscribers"] == 0
    assert daemon.token not in str(shown)


def test_the_openapi_document_describes_every_route(http: httpx2.Client) -> None:
    document = http.get("/v3/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert {"Envelope", "TurnDone", "ErrorBody", "EventPage"} <= set(document["components"]["schemas"])
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert all(operation["summary"] and operation["description"] for operation in operations)
    answers = [set(operation["responses"]) for operation in operations]
    assert all({"400", "401", "500"} <= statuses and not statuses & {"422", "4XX"} for statuses in answers)
    names = {parameter["name"] for parameter in document["paths"]["/v3/events"]["get"]["parameters"]}
    assert names == {"after", "limit", "wait", "types", "session_id", "stream_id"}
    after, limit, wait = document["paths"]["/v3/events"]["get"]["parameters"][:3]
    assert (after["schema"]["minimum"], limit["schema"]["minimum"], limit["schema"]["maximum"]) == (0, 1, 500)
    assert (wait["schema"]["minimum"], wait["schema"]["maximum"]) == (0, 5.0)
    assert document["paths"]["/v3/health"]["get"]["security"] == []
    assert document["security"] == [{"token": []}]
