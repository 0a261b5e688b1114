"""Tests of GET /metrics and /admin/events on a running server, and of the comments that a waiting client receives."""

import httpx2
import pytest
from openai import OpenAI

from lmx_lab.engine import memory
from lmx_lab.http import Limits
from tests.support.asking import ENDLESS, SEA, chat_body, echo_body
from tests.support.labs import PACE, events_of, scrape, serving, wait_until_idle, watching
from tests.support.models import write_tiny_llama
from tests.support.waiting import until

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


# The ends of requests, and the comments that a waiting client receives


def test_each_end_is_reported_once(echo_home):
    with (
        serving(echo_home, "echo", slots=2, queue_limit=0, echo_tokens_per_s=PACE) as lab,
        httpx2.Client(base_url=lab.url) as http,
        watching(lab) as seen,
    ):
        good = http.post(CHAT, json=echo_body())
        http.post(CHAT, json=echo_body(stream=True, max_tokens=3)).read()
        http.post(CHAT, json=echo_body(n=2))
        http.post(CHAT, json=echo_body(messages=[{"role": "user", "content": "word " * 40_000}]))
        http.post("/v1/completions", json={"model": "echo", "prompt": ["a b c", "b c d"], "max_tokens": 1})
        with http.stream("POST", CHAT, json=echo_body(stream=True, **ENDLESS)) as response:
            assert any('"delta":{"content":' in line for line in response.iter_lines())
        wait_until_idle(lab)
        until(lambda: len(seen) == 8)
        lab.chat("hello", max_tokens=1)
        until(lambda: len(seen) == 9)
    ends = [(event["finish_reason"], event["code"]) for event in seen]
    length = ("length", None)
    refused = ("error", "context_length_exceeded")
    assert ends == [length, length, length, length, refused, length, length, ("cancelled", None), length]
    assert seen[0]["request_id"] == good.headers["x-request-id"]
    assert (seen[0]["model"], seen[0]["completion_tokens"]) == ("echo", 8)
    assert 0 < seen[7]["completion_tokens"] < ENDLESS["max_tokens"]
    assert seen[8]["request_id"] == ""
    # The two choices of one request, and the two prompts of another, have an index.
    assert [{event["index"] for event in seen[at : at + 2]} for at in (2, 5)] == [{0, 1}, {0, 1}]


def test_a_deleted_stream_of_a_lab_is_reported_too(echo_home):
    with serving(echo_home, "echo", echo_tokens_per_s=PACE) as lab, watching(lab) as seen:
        for _ in lab.chat("hello again and again", stream=True, ignore_eos=True, max_tokens=30_000):
            break
        until(lambda: len(seen) == 1)
    assert seen[0]["finish_reason"] == "cancelled"


def test_a_client_that_waits_receives_comments(smollm2, tmp_path):
    write_tiny_llama(tmp_path / "models" / "tiny-long", smollm2.path, seed=0, context=8192)
    long = [{"role": "user", "content": "word " * 3500}]
    with serving(tmp_path, "tiny-long", slots=1) as lab, httpx2.Client(base_url=lab.url) as http:
        lab.server.services.api.state.limits = Limits(keep_alive_s=0.005)
        body = chat_body(model="tiny-long", messages=long, stream=True, max_tokens=1)
        with http.stream("POST", CHAT, json=chat_body(model="tiny-long", stream=True, max_tokens=4000)) as running:
            others = running.iter_text()  # kept, because deleting it closes the connection
            next(others)
            with http.stream("POST", CHAT, json=body) as waiting:
                pieces = waiting.iter_lines()
                assert any(": queued" in piece for piece in pieces)
                running.close()
                assert any(": prompt " in piece for piece in pieces)
                *_, done, _ = pieces
    assert done == "data: [DONE]"


@pytest.mark.slow
def test_openai_python_ignores_the_comments(echo_home):
    fields = {"model": "echo", "messages": SEA, "temperature": 0, "max_tokens": 8}
    with (
        serving(echo_home, "echo", slots=1, echo_tokens_per_s=PACE) as lab,
        OpenAI(**lab.openai, max_retries=0) as client,
    ):
        lab.server.services.api.state.limits = Limits(keep_alive_s=0.001)
        body = echo_body(stream=True, **ENDLESS)
        with httpx2.stream("POST", f"{lab.url}{CHAT}", json=body) as running:
            pieces = running.iter_text()  # kept, because deleting it closes the connection
            next(pieces)
            stream = client.chat.completions.create(**fields, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        whole = client.chat.completions.create(**fields)
    assert text == whole.choices[0].message.content
