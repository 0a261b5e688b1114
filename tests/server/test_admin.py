"""Tests of the rights of callers on other machines, of messages for them, and of readiness.

``tests/security/test_lan.py`` tests with two machines.
"""

import math
from pathlib import Path

import pytest

from lmx_lab.http.errors import status_of
from lmx_lab.server.app import without_paths
from lmx_lab.server.health import problem
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from tests.support.asking import refused
from tests.support.labs import events_of, serving
from tests.support.models import TINY_ENTRY, in_memory

ELSEWHERE = {"x-forwarded-for": "192.168.1.6"}
"""The header of a proxy, which may forward requests from other machines."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), None) as lab:
        yield lab


@pytest.mark.parametrize("action", ["load", "unload", "cancel"])
def test_callers_on_other_machines_list_models_and_change_nothing(http, action):
    asked = http.post(f"/admin/models/{action}", json={"model": "tiny"}, headers=ELSEWHERE)
    assert "--lan-admin" in refused(asked, 403, "admin-forbidden")["message"]
    assert http.get("/admin/models", headers=ELSEWHERE).json()["in_use"] is None


def test_only_callers_on_this_machine_may_steer_requests(lab, http):
    steer = {"steer": [{"layer": 0, "vector": [1.0]}]}
    bodies = {"chat/completions": {"messages": [{"role": "user", "content": "a"}]}, "completions": {"prompt": "a"}}
    for path, body in bodies.items():
        with events_of(lab, "requests") as events:
            refused(http.post(f"/v1/{path}", json=body | steer, headers=ELSEWHERE), 403, "admin-forbidden")
            refused(http.post(f"/v1/{path}", json=body | steer), 503, "no-model-loaded")
            # Metrics and records are made from the same ends of requests.
            ends = (event["code"] for event in events if event["type"] == "request")
            assert [next(ends), next(ends)] == ["admin-forbidden", "no-model-loaded"]


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("tiny at /home/me/models/tiny cannot be loaded", "tiny at tiny cannot be loaded"),
        ("'/srv/x/tiny/model.safetensors': damaged", "'model.safetensors': damaged"),
        ("(/srv/x/tiny/), see", "((a folder)), see"),
        ("/data/my models/tiny/config.json is missing", "tiny/config.json is missing"),
        ("load it: POST /admin/models/load, GET /v1/models", "load it: POST /admin/models/load, GET /v1/models"),
        ("see /docs, https://host.example/a/b or org/name/x", "see /docs, https://host.example/a/b or org/name/x"),
    ],
)
def test_messages_lose_paths_and_keep_routes_and_addresses(text, public):
    assert without_paths(text, [Path("/data"), Path("/data/my models")]) == public


# Readiness, in states that are hard to produce with a real engine


@pytest.mark.parametrize(
    ("now", "code", "part"),
    [
        (EngineSnapshot(), "no-model-loaded", "POST /admin/models/load"),
        (EngineSnapshot(state="loading"), "no-model-loaded", "a model is being loaded"),
        (EngineSnapshot(unloaded_model="tiny", unload_cause="requested"), "no-model-loaded", "tiny was unloaded; load"),
        (EngineSnapshot(unloaded_model="tiny", unload_cause="idle"), "no-model-loaded", "was idle; load it again"),
        (EngineSnapshot(unloaded_model="tiny", unload_cause="memory"), "oom-unloaded", "load it again, or a smaller"),
        # While a model is loading, the earlier state is not mentioned.
        (
            EngineSnapshot(state="loading", unloaded_model="tiny", unload_cause="memory"),
            "no-model-loaded",
            "a model is being loaded",
        ),
        (EngineSnapshot(state="dead"), "internal-error", "the engine has died"),
        (in_memory(TINY_ENTRY, active_requests=1, progress_at=-math.inf), "internal-error", "has made no step"),
    ],
)
def test_each_reason_has_its_code_and_names_the_next_step(now, code, part):
    error = problem(now, settings=Settings(idle_unload_s=300, stall_limit_s=60))
    assert (status_of(error), error.code) == (503, code)
    assert part in error.message
    # Callers on other machines cannot load a model.
    elsewhere = problem(now, settings=Settings(idle_unload_s=300, stall_limit_s=60), local=False)
    assert elsewhere.code == code
    assert "POST" not in elsewhere.message
    assert ("ask the person who runs this server" in elsewhere.message) == ("POST" in error.message)
    allowed = problem(now, settings=Settings(idle_unload_s=300, stall_limit_s=60, lan_admin=True), local=False)
    assert allowed.message == error.message


def test_a_loaded_model_is_ready_only_while_its_engine_runs():
    now = in_memory(TINY_ENTRY)
    assert problem(now, settings=Settings(idle_unload_s=300, stall_limit_s=60)) is None
    assert problem(now, settings=Settings(idle_unload_s=300, stall_limit_s=60), alive=False) is not None
