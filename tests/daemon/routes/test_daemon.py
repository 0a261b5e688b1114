"""The state of the daemon and its OpenAPI document."""

from __future__ import annotations

import httpx2
import pytest

from lmx_lab.daemon.daemon import Daemon


def test_the_state_of_the_daemon_contains_ids_and_limits(http: httpx2.Client, daemon: Daemon) -> None:
    shown = http.get("/v3/daemon").json()
    assert (shown["daemon_id"], shown["upstream"]["url"]) == (daemon.daemon_id, daemon.upstream_url)
    assert shown["limits"]["wait_s"] == 5.0
    assert shown["latest_seq"] >= shown["oldest_seq"] == 1
    assert shown["counts"]["subscribers"] == 0
    assert daemon.token not in str(shown)


@pytest.mark.slow
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
