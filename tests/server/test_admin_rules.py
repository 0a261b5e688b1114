"""What callers without this machine's rights may do and see. Tests send no traffic off loopback, so the scope is made;
``tests/strangers/test_lan.py`` has two machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI
from lmx_lab.server.loading import Event, ModelLoader, check_admin
from starlette.types import Message, Scope

from lmx_lab.broadcast import Feed
from lmx_lab.engine import ModelManager
from lmx_lab.errors import AdminForbiddenError, ModelNotFoundError
from lmx_lab.http.guard import local_policy
from lmx_lab.server import create_server
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec, ModelEntry
from lmx_lab.weights import Catalog

pytestmark = pytest.mark.anyio


def scope(client: str | None, server: str, path: str = "/", method: str = "POST") -> Scope:
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


def test_other_hosts_change_something_only_where_the_operator_said_so() -> None:
    check_admin(local=True, lan_admin=False)
    check_admin(local=False, lan_admin=True)
    with pytest.raises(AdminForbiddenError, match="--lan-admin"):
        check_admin(local=False, lan_admin=False)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/admin/models/load", 403),
        ("POST", "/admin/models/unload", 403),
        ("GET", "/admin/models", 200),
        ("GET", "/healthz", 200),
    ],
)
async def test_the_routes_ask_who_calls(tmp_path: Path, method: str, path: str, status: int) -> None:
    settings = Settings.read({}, home=tmp_path)
    policy = local_policy(8400)
    server = create_server(
        manager=ModelManager(settings), catalog=Catalog(settings), settings=settings, policy=lambda: policy
    )
    assert isinstance(server.api, FastAPI)
    assert await answer(server.asgi, scope("192.168.1.6", "192.168.1.5", path, method)) == status


async def answer(app: object, request: Scope) -> int:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"model": "tiny"}' if request["path"].endswith("/load") else b""}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(request, receive, send)  # type: ignore[operator]
    return int(sent[0]["status"])


async def test_another_host_neither_downloads_nor_names_paths(tiny: ModelEntry, tmp_path: str) -> None:
    settings = Settings.read({}, home=tmp_path)
    feed: Feed[Event] = Feed()
    loader = ModelLoader(manager=ModelManager(settings), catalog=Catalog(settings), feed=feed, downloads=True)
    for name in ("smollm2-135m", "org/name", str(tiny.path)):
        with pytest.raises(ModelNotFoundError):
            await loader.load(LoadSpec(model=name), local=False)
