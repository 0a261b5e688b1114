"""The routes of the daemon itself and of sessions, and strict query parameters, bodies and ids on all routes."""

from itertools import product
from urllib.parse import quote

import pytest

from tests.support.asking import refused

WEIRD = ["none", "x" * 300, "a b", "..", "%", "'; DROP TABLE sessions; --", "ä", "\x00", "*", "\u202e"]


@pytest.mark.parametrize("name", WEIRD)
def test_ids_that_do_not_exist_are_not_found_whatever_their_characters(http, session, name):
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
            continue  # The client has resolved it as the parent folder.
        refused(answer, 404, code)
    decision = {"decision": "allow"}
    refused(http.post(f"/v3/permissions/{part}", json=decision), 404, "permission-not-found")
    assert http.delete(f"/v3/mcp/servers/{part}").status_code == 204
    assert http.get("/v3/sessions").status_code == 200


def test_an_unknown_route_refers_to_the_openapi_document(http):
    assert "/v3/openapi.json" in refused(http.get("/v3/nothing"), 404, "invalid-request")["message"]
    assert refused(http.put("/v3/sessions"), 405, "invalid-request")


JUNK = ["", " 5", "5 ", "+5", "-1", "5_0", "5.0", "0x5", "1e3", "\u0665", "five", "9" * 17, "null"]


@pytest.mark.parametrize("junk", JUNK)
def test_numbers_accept_only_digits(http, junk):
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
def test_the_error_names_an_invalid_or_unknown_parameter(http, path, query, param):
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
def test_an_invalid_body_is_refused(http, content, kind, status, code):
    before = http.get("/v3/daemon").json()["counts"]["sessions"]
    refused(http.post("/v3/sessions", content=content, headers={"content-type": kind}), status, code)
    assert http.get("/v3/daemon").json()["counts"]["sessions"] == before


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *product(["PATCH"], ["sessions/none", "mcp/servers/none"]),
        *product(["POST"], ["sessions/none/fork", "sessions/none/turns", "sessions/none/cancel", "permissions/none"]),
        *product(["POST"], ["mcp/servers", "mcp/test", "daemon/shutdown"]),
    ],
)
def test_no_route_accepts_unknown_fields(http, method, path):
    refused(http.request(method, f"/v3/{path}", json={"no_such_field": 1}), 400, "invalid-request")


def test_the_state_of_the_daemon_contains_ids_and_limits(http, daemon):
    shown = http.get("/v3/daemon").json()
    assert (shown["daemon_id"], shown["upstream"]["url"]) == (daemon.daemon_id, daemon.upstream_url)
    assert shown["limits"]["wait_s"] == 5.0
    assert shown["latest_seq"] >= shown["oldest_seq"] == 1
    assert shown["counts"]["subscribers"] == 0
    assert daemon.token not in str(shown)


@pytest.mark.slow
def test_the_openapi_document_describes_every_route(http):
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


def test_the_errors_of_sessions_have_their_statuses(http, session):
    """What the routes of sessions return is tested with the client in ``tests/client/test_daemon.py``."""
    assert http.patch(f"/v3/sessions/{session}", json={"title": "Two", "revision": 1}).status_code == 200
    refused(http.patch(f"/v3/sessions/{session}", json={"title": "Three", "revision": 1}), 409, "revision-conflict")
    assert http.post(f"/v3/sessions/{session}/fork").status_code == 201
    refused(http.post(f"/v3/sessions/{session}/fork", json={"through_turn_id": "none"}), 404, "turn-not-found")
    assert http.post("/v3/sessions").status_code == 201, "without a body too"
