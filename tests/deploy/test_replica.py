"""Test the application of a replica in this process: its lifespan, its health, and the rights of its callers."""

import asyncio
import pickle
import sys
from contextlib import asynccontextmanager

import httpx2
import pytest

from lmx_lab.deploy.ray_serve import Replica, ReplicaApp, application
from lmx_lab.errors import InvalidRequestError, MissingPackageError, NotLoadedError
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec

CHAT = {"model": "default", "messages": [{"role": "user", "content": "Hello"}]}


@asynccontextmanager
async def started(app):
    """Start and end the lifespan of an application; yields the messages that it sends."""
    received = asyncio.Queue()
    sent = []
    answered = asyncio.Event()

    async def send(message):
        sent.append(message)
        answered.set()

    running = asyncio.create_task(app({"type": "lifespan"}, received.get, send))
    received.put_nowait({"type": "lifespan.startup"})
    await answered.wait()
    yield sent
    received.put_nowait({"type": "lifespan.shutdown"})
    await running


def test_a_replica_answers_from_its_start_to_its_end_and_no_caller_may_load_models(tmp_path):
    settings = Settings(home=tmp_path, allowed_hosts=("serve.example",), record="all")
    app = pickle.loads(pickle.dumps(ReplicaApp(settings, LoadSpec(model="echo"))))
    replica = Replica()
    replica.app = app

    async def run():
        with pytest.raises(NotLoadedError):
            app.check()
        async with started(app) as sent:
            await replica.check_health()
            transport = httpx2.ASGITransport(app)
            for url in ("http://127.0.0.1:8000", "http://serve.example"):
                async with httpx2.AsyncClient(transport=transport, base_url=url) as client:
                    ready = (await client.get("/readyz")).json()
                    assert ready["model"] == "echo"
                    assert "recorded" not in ready
                    answer = await client.post("/v1/chat/completions", json=CHAT)
                    assert answer.json()["choices"][0]["message"]["content"] == "Hello"
                    assert (await client.post("/admin/models/unload", json={})).status_code == 403
            async with httpx2.AsyncClient(transport=transport, base_url="http://other.example") as client:
                assert (await client.get("/readyz")).status_code == 421
        with pytest.raises(NotLoadedError):
            app.check()
        assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_fails_the_start_with_the_reason(tmp_path):
    app = ReplicaApp(Settings(home=tmp_path, downloads=False), LoadSpec(model="no-such-model"))

    async def run():
        async with started(app) as sent:
            return sent

    (failed,) = asyncio.run(run())
    assert failed["type"] == "lifespan.startup.failed"
    assert "no-such-model" in failed["message"]


def test_invalid_settings_and_a_missing_package_are_reported(monkeypatch):
    with pytest.raises(InvalidRequestError, match="allowed_hosts"):
        ReplicaApp(Settings(allowed_hosts=("*",)), LoadSpec(model="echo"))
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(MissingPackageError, match=r"lmx-lab\[ray\]"):
        application("echo")
