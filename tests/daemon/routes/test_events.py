"""Polling events."""

from __future__ import annotations

import threading
from typing import Any

import httpx2
import pytest

from lmx_lab.daemon.daemon import Daemon
from tests.support.asking import refused
from tests.support.daemons import client


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
