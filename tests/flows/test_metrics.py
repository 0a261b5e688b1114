"""Tests of GET /metrics and /admin/events on a running server."""

import httpx2
import pytest

from lmx_lab.engine import memory
from tests.support.asking import ENDLESS, echo_body
from tests.support.labs import events_of, scrape, serving

CHAT = "/v1/chat/completions"


def test_a_request_is_counted(fresh_http):
    before = scrape(fresh_http)
    assert (before["engine_up"], before["model_loaded{model=echo}"], before["requests_active"]) == (1, 1, 0)
    usage = fresh_http.post(CHAT, json=echo_body(max_tokens=8)).json()["usage"]
    after = scrape(fresh_http)
    assert after["requests_total{code=,kind=chat,outcome=length}"] == 1
    assert after["output_tokens_total"] - before["output_tokens_total"] == usage["completion_tokens"] == 8
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == usage["prompt_tokens"]
    for name in ("queue", "time_to_first_token", "time_per_output_token", "request"):
        assert after[f"{name}_seconds_count"] == 1
    assert after["memory_total_bytes"] > after["memory_used_bytes"] > after["model_memory_bytes"] / 2 > 0
    assert after["uptime_seconds"] > before["uptime_seconds"]


def test_a_refused_request_is_counted_with_its_code_and_without_its_model_name(fresh_http):
    assert fresh_http.post(CHAT, json=echo_body(model="no-such-model")).status_code == 404
    assert scrape(fresh_http)["requests_total{code=model-not-found,kind=chat,outcome=error}"] == 1
    assert "no-such-model" not in fresh_http.get("/metrics").text


def test_a_shortage_of_memory_is_reported_while_it_lasts(echo_home, monkeypatch):
    reasons = [None]
    monkeypatch.setattr(memory, "pressure_reason", lambda **_: reasons[-1])
    with serving(echo_home, "echo") as lab, httpx2.Client(base_url=lab.url) as http:
        before = scrape(http)
        assert (before["memory_pressure"], before["memory_limit_bytes"] > before["memory_footprint_bytes"] > 0) == (
            0,
            True,
        )
        with events_of(lab, "pressure") as events:
            changes = (event for event in events if event["type"] == "pressure")
            reasons.append("0.01 GB of the container's 1.00 GB are free")
            begin, during = next(changes), scrape(http)
            reasons.append(None)
            end = next(changes)
        assert (begin["active"], begin["reason"]) == (True, "0.01 GB of the container's 1.00 GB are free")
        assert (during["memory_pressure"], during["memory_limit_bytes"] < before["memory_limit_bytes"]) == (1, True)
        assert (end["active"], end["reason"], end["limit_bytes"] > begin["limit_bytes"]) == (False, None, True)
        assert scrape(http)["memory_pressure"] == 0


def test_an_idle_unload_is_reported_by_events_and_readiness(echo_home):
    with serving(echo_home, None, idle_unload_s=0.2) as lab, httpx2.Client(base_url=lab.url) as http:
        with events_of(lab, "models") as events:
            http.post("/admin/models/load", json={"model": "echo"})
            event = next(event for event in events if (event["type"], event.get("stage")) == ("model", "unloaded"))
        assert (event["model"], event["message"]) == ("echo", "idle for 0.2 s")
        ready = http.get("/readyz")
        error = ready.json()["error"]
        assert (ready.status_code, error["code"]) == (503, "no-model-loaded")
        assert "echo was unloaded because it was idle" in error["message"]
        assert not [name for name in scrape(http) if name.startswith("model_loaded")]


def test_requests_with_a_malformed_body_are_not_counted(fresh_http):
    assert fresh_http.post(CHAT, json=echo_body(temperature=9)).status_code == 400
    assert not [name for name in scrape(fresh_http) if name.startswith("requests_total")]
    (help_line,) = [
        line for line in fresh_http.get("/metrics").text.splitlines() if "HELP lmx_lab_requests_total" in line
    ]
    assert "unless its body was malformed" in help_line


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_head_is_answered_like_get_without_a_body(fresh_http, path):
    for _ in range(2):
        full, head = fresh_http.get(path), fresh_http.head(path)
        assert (head.status_code, head.headers["content-type"]) == (full.status_code, full.headers["content-type"])
        assert head.content == b""
        fresh_http.post("/admin/models/unload", headers={"content-type": "application/json"})


def test_metrics_have_the_specified_three_types_and_no_others(lab):
    seen = {}
    with events_of(lab) as events:
        while len(seen) < 3:
            event = next(events)
            seen[event["type"]] = event
    assert set(seen) == {"throughput", "memory", "heartbeat"}
    assert set(seen["throughput"]) == {"type", "tokens_per_second", "active_requests", "queued_requests"}
    memory = seen["memory"]
    assert memory["pct"] == pytest.approx(100 * memory["vram_used_gb"] / memory["vram_total_gb"])
    assert seen["heartbeat"]["uptime"] > 0


@pytest.mark.slow
def test_throughput_shows_running_work(lab, http):
    with events_of(lab) as events, http.stream("POST", CHAT, json=echo_body(stream=True, **ENDLESS)) as response:
        assert response.status_code == 200
        pieces = response.iter_text()  # kept, because deleting it closes the connection
        next(pieces)
        while (event := next(events))["type"] != "throughput" or event["tokens_per_second"] == 0:
            pass


def test_loads_and_requests_are_reported_to_clients_that_include_them(fresh_lab, fresh_http):
    seen = []
    with events_of(fresh_lab, "models", "requests") as events:
        fresh_http.post(CHAT, json=echo_body())
        fresh_http.post("/admin/models/unload")
        fresh_http.post("/admin/models/load", json={"model": "echo"})
        while not any(event["type"] == "model" and event["stage"] == "loaded" for event in seen):
            seen.append(next(events))
    (request,) = [event for event in seen if event["type"] == "request"]
    assert (request["model"], request["completion_tokens"]) == ("echo", 8)


def test_an_unknown_include_is_400(http):
    assert http.get("/admin/events?include=secrets").status_code == 400
