"""Tests that the end of each request is reported once, and that a waiting client receives comments."""

import httpx2
import pytest
from openai import OpenAI

from lmx_lab.http import Limits
from tests.support.asking import ENDLESS, SEA, chat_body, echo_body
from tests.support.labs import PACE, serving, wait_until_idle, watching
from tests.support.models import write_tiny_llama
from tests.support.waiting import until

PATH = "/v1/chat/completions"


def test_each_end_is_reported_once(echo_home):
    with (
        serving(echo_home, "echo", slots=2, queue_limit=0, echo_tokens_per_s=PACE) as lab,
        httpx2.Client(base_url=lab.url) as http,
        watching(lab) as seen,
    ):
        good = http.post(PATH, json=echo_body())
        http.post(PATH, json=echo_body(stream=True, max_tokens=3)).read()
        http.post(PATH, json=echo_body(n=2))
        http.post(PATH, json=echo_body(messages=[{"role": "user", "content": "word " * 40_000}]))
        http.post("/v1/completions", json={"model": "echo", "prompt": ["a b c", "b c d"], "max_tokens": 1})
        with http.stream("POST", PATH, json=echo_body(stream=True, **ENDLESS)) as response:
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
        with http.stream("POST", PATH, json=chat_body(model="tiny-long", stream=True, max_tokens=4000)) as running:
            others = running.iter_text()  # kept, because deleting it closes the connection
            next(others)
            with http.stream("POST", PATH, json=body) as waiting:
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
        with httpx2.stream("POST", f"{lab.url}{PATH}", json=body) as running:
            pieces = running.iter_text()  # kept, because deleting it closes the connection
            next(pieces)
            stream = client.chat.completions.create(**fields, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        whole = client.chat.completions.create(**fields)
    assert text == whole.choices[0].message.content
