"""The routes of the daemon itself and of sessions, and the OpenAPI document."""

import pytest

from tests.support.asking import refused


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


def test_a_session_is_created_once_for_an_id(http):
    body = {"session_id": "mine", "title": "First", "metadata": {"a": [1]}}
    made = http.post("/v3/sessions", json=body)
    again = http.post("/v3/sessions", json={"session_id": "mine", "title": "Second"})
    assert (made.status_code, again.status_code) == (201, 200)
    assert again.json() == made.json()
    assert (made.json()["title"], made.json()["metadata"], made.json()["status"]) == ("First", {"a": [1]}, "idle")
    assert [http.delete("/v3/sessions/mine").status_code for _ in range(2)] == [204, 204]
    refused(http.get("/v3/sessions/mine"), 404, "session-not-found")


def test_a_session_can_be_created_without_a_body(http):
    made = http.post("/v3/sessions")
    assert made.status_code == 201
    assert http.delete(f"/v3/sessions/{made.json()['session_id']}").status_code == 204


def test_the_errors_of_sessions_have_their_statuses(http, session):
    """What the routes of sessions return is tested with the client in ``tests/client/test_daemon.py``."""
    assert http.patch(f"/v3/sessions/{session}", json={"title": "Two", "revision": 1}).status_code == 200
    refused(http.patch(f"/v3/sessions/{session}", json={"title": "Three", "revision": 1}), 409, "revision-conflict")
    assert http.post(f"/v3/sessions/{session}/fork").status_code == 201
    refused(http.post(f"/v3/sessions/{session}/fork", json={"through_turn_id": "none"}), 404, "turn-not-found")


def test_events_continue_from_the_cursor_of_a_snapshot(http, session):
    cursor = http.get(f"/v3/sessions/{session}").json()["cursor"]
    http.patch(f"/v3/sessions/{session}", json={"title": "Later"})
    page = http.get(f"/v3/sessions/{session}/events", params={"after": cursor}).json()
    assert [event["event"] for event in page["events"]] == ["session.updated"]
    assert page["events"][0]["data"]["session"]["title"] == "Later"
