"""Tests of the rights of callers on other machines, of messages for them, and of readiness.

Callers on other machines are ASGI scopes, because the tests send no traffic outside of loopback.
``tests/security/test_lan.py`` tests with two machines.
"""

import asyncio
import math
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.types import Message

from lmx_lab.engine import ModelManager
from lmx_lab.errors import AdminForbiddenError, ModelNotFoundError
from lmx_lab.http.errors import status_of
from lmx_lab.http.guard import local_policy
from lmx_lab.server import create_server
from lmx_lab.server.admin import check_admin
from lmx_lab.server.app import without_paths
from lmx_lab.server.health import problem
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import LoadSpec
from tests.support.models import TINY_ENTRY

pytestmark = pytest.mark.anyio


def scope(client, server, path="/", method="POST"):
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost:8400"), (b"content-type", b"application/json")],
        "client": (client, 5000) if client else None,
        "server": (server, 8400),
    }


def test_other_hosts_load_models_only_with_lan_admin():
    closed, opened = (ModelManager(Settings(lan_admin=lan_admin)) for lan_admin in (False, True))
    check_admin(closed, local=True)
    check_admin(opened, local=False)
    with pytest.raises(AdminForbiddenError, match="--lan-admin"):
        check_admin(closed, local=False)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/admin/models/load", 403),
        ("POST", "/admin/models/unload", 403),
        ("POST", "/admin/models/cancel", 403),
        ("GET", "/admin/models", 200),
        ("GET", "/healthz", 200),
    ],
)
async def test_routes_check_where_the_caller_is(tmp_path, method, path, status):
    settings = Settings.read({}, home=tmp_path)
    policy = local_policy(8400)
    server = create_server(manager=ModelManager(settings), policy=lambda: policy)
    assert isinstance(server.api, FastAPI)
    assert await answer(server.asgi, scope("192.168.1.6", "192.168.1.5", path, method)) == status


async def test_only_callers_on_this_machine_may_steer_requests(tmp_path):
    settings = Settings.read({}, home=tmp_path)
    policy = local_policy(8400)
    server = create_server(manager=ModelManager(settings), policy=lambda: policy)
    with server.feed.subscribe() as events:
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert await answer(server.asgi, scope("192.168.1.6", "192.168.1.5", path)) == 403
            # No model is loaded.
            assert await answer(server.asgi, scope("127.0.0.1", "127.0.0.1", path)) == 503
            # Metrics and records are made from the same ends of requests.
            assert [(await anext(events)).code for _ in range(2)] == ["admin-forbidden", "no-model-loaded"]


BODIES = {
    "/cancel": b'{"model": "tiny"}',
    "/load": b'{"model": "tiny"}',
    "/chat/completions": b'{"messages": [{"role": "user", "content": "a"}], "steer": [{"layer": 0, "vector": [1.0]}]}',
    "/completions": b'{"prompt": "a", "steer": [{"layer": 0, "vector": [1.0]}]}',
}


async def answer(app, request):
    sent = []
    received = []

    async def receive() -> Message:
        if received:
            await asyncio.Event().wait()  # The caller stays connected.
        received.append(True)
        body = next((body for end, body in BODIES.items() if request["path"].endswith(end)), b"")
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(request, receive, send)
    return int(sent[0]["status"])


async def test_other_hosts_neither_download_models_nor_name_paths(tiny, tmp_path):
    async with ModelManager(Settings.read({}, home=tmp_path)) as manager:
        for name in ("smollm2-135m", "org/name", str(tiny.path)):
            with pytest.raises(ModelNotFoundError):
                await manager.load(LoadSpec(model=name), local=False)


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
        (EngineSnapshot(state="loading"), "no-model-loaded", "the engine is loading"),
        (EngineSnapshot(unloaded_model="tiny", unload_cause="requested"), "no-model-loaded", "the engine is empty"),
        (EngineSnapshot(unloaded_model="tiny", unload_cause="idle"), "no-model-loaded", "no request came for 300 s"),
        (EngineSnapshot(unloaded_model="tiny", unload_cause="memory"), "oom-unloaded", "load it again, or a smaller"),
        # While a model is loading, the earlier state is not mentioned.
        (
            EngineSnapshot(state="loading", unloaded_model="tiny", unload_cause="memory"),
            "no-model-loaded",
            "the engine is loading",
        ),
        (EngineSnapshot(state="dead"), "internal-error", "the engine has died"),
        (EngineSnapshot(state="ready", active_requests=1, progress_at=-math.inf), "internal-error", "has made no step"),
    ],
)
def test_each_reason_has_its_code_and_names_the_next_step(now, code, part):
    error = problem(now, settings=Settings(idle_unload_s=300, stall_limit_s=60))
    assert (status_of(error), error.code) == (503, code)
    assert part in error.message


def test_a_loaded_model_is_ready_only_while_its_engine_runs():
    now = EngineSnapshot(state="ready", entry=TINY_ENTRY)
    assert problem(now, settings=Settings(idle_unload_s=300, stall_limit_s=60)) is None
    assert problem(now, settings=Settings(idle_unload_s=300, stall_limit_s=60), alive=False) is not None
