"""Tests that only local callers receive paths of models. With a host that the operator allowed, a caller on loopback is
not local, like a caller on another machine."""

import json
import os
import shutil
import socket

import httpx2
import pytest
from websockets.sync.client import connect

from tests.support.asking import refused
from tests.support.labs import events_of, serving

pytestmark = pytest.mark.slow
ELSEWHERE = {"host": "elsewhere.example"}
CHAT = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def folder(tiny_home, tmp_path_factory):
    """Return a folder with a model, and one with damaged weights."""
    folder = tmp_path_factory.mktemp("private") / "of the operator"
    for name in ("mine", "listed/damaged"):
        shutil.copytree(tiny_home / "models" / "tiny", folder / name)
    for weights in (folder / "listed" / "damaged").glob("*.safetensors"):
        os.truncate(weights, weights.stat().st_size - 1)
    return folder


@pytest.fixture(scope="module")
def lab(tiny_home, folder):
    """Run a lab with a model that was loaded by its path."""
    settings = {"model_folders": (folder / "listed",), "allowed_hosts": ("elsewhere.example",)}
    with serving(tiny_home, None, lan_admin=True, **settings) as lab:
        lab.load(folder / "mine")
        yield lab


def test_the_error_of_a_failed_load_contains_the_reason_but_no_path(lab, folder):
    def load(**headers):
        answer = httpx2.post(f"{lab.url}/admin/models/load", json={"model": "damaged"}, headers=headers)
        return refused(answer, 400, "invalid-request")["message"]

    assert str(folder) in load()
    message = load(**ELSEWHERE)
    assert "damaged" in message
    assert str(folder) not in message
    assert "of the operator" not in message


def test_remote_callers_cannot_use_paths_or_download_even_with_lan_admin(lab, folder):
    for name in (str(folder / "mine"), str(folder / "listed" / "damaged"), "org/name", "smollm2-135m"):
        answer = httpx2.post(f"{lab.url}/admin/models/load", json={"model": name}, headers=ELSEWHERE)
        refused(answer, 404, "model-not-found")


def test_events_contain_no_paths(lab, folder):
    def failed(events):
        return next(event for event in events if event["type"] == "model" and event["stage"] == "failed")

    shown = ("models", "requests")
    with events_of(lab, *shown) as own, events_of(lab, *shown, headers=ELSEWHERE) as others:
        httpx2.post(f"{lab.url}/admin/models/load", json={"model": str(folder / "listed" / "damaged")})
        assert str(folder) in failed(own)["message"]
        event = failed(others)
        assert event["model"] == "damaged"
        assert str(folder) not in event["message"]
        # Others get the events of their own requests only.
        httpx2.post(f"{lab.url}/v1/chat/completions", json=CHAT, headers=ELSEWHERE)
        ended = [next(event for event in events if event["type"] == "request") for events in (own, others)]
        assert [event["model"] for event in ended] == [str(folder / "mine"), "mine"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "default", "prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {**CHAT, "model": "tiny"}),
        ("/v1/embeddings", {"model": "default", "input": "a"}),
        ("/v1/rerank", {"model": "default", "query": "a", "documents": ["b"]}),
        ("/admin/models/unload", {"model": "tiny"}),
        ("/admin/models/cancel", {"model": "tiny"}),
    ],
)
def test_responses_and_errors_contain_no_paths(lab, folder, path, body):
    own = httpx2.post(f"{lab.url}{path}", json=body)
    others = httpx2.post(f"{lab.url}{path}", json=body, headers=ELSEWHERE)
    assert own.status_code == others.status_code
    assert str(folder) not in others.text


def test_websocket_messages_contain_no_paths(lab, folder):
    way = socket.create_connection(("127.0.0.1", lab.server.port))
    with connect(f"ws://elsewhere.example:{lab.server.port}/v1/chat/stream", sock=way, proxy=None) as client:
        client.send(json.dumps({**CHAT, "model": "tiny"}))
        message = str(client.recv())
    assert "no-model-loaded" in message
    assert str(folder) not in message
