"""Tests of the portal of blocking clients: which calls may wait, the background loop, and its end."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import contextmanager

import pytest

from lmx_lab import errors
from lmx_lab.client.blocking import ClientPortal
from lmx_lab.client.lab import LabClient
from lmx_lab.http import uvicorn_server
from lmx_lab.portal import LoopThread
from tests.support.programs import run_script
from tests.support.sockets import Endless, answering, lab_app, whole

ALIVE = whole('{"status": "ok"}')
THREAD = "lmx-lab-background"
EVENT_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-lmx-lab: 0\r\n\r\n"


@contextmanager
def served(host="127.0.0.1"):
    """Run the server on an event loop in a thread."""
    thread = LoopThread("test-server")
    thread.start()
    server = thread.run(uvicorn_server.serve(lab_app, uvicorn_server.bind(host, 0, explicit=False)))
    try:
        yield server
    finally:
        thread.run(server.stop(0))
        thread.stop()


def make_portal():
    async def close() -> None:
        pass

    return ClientPortal(close)


# --- calls that would wait for themselves


def test_a_blocking_call_on_the_clients_loop_is_refused():
    async def call(client: LabClient) -> str:
        return client.version()

    with answering(ALIVE) as server, LabClient(server.url) as client:
        client.version()
        with pytest.raises(errors.HostingError, match="await the async client"):
            client._portal.run(call(client))


# --- the background loop


@pytest.mark.slow
def test_all_clients_share_one_loop_which_importing_does_not_start():
    script = f"""
import threading
from lmx_lab.client import lab as it
from lmx_lab.errors import LabError
names = lambda: [thread.name for thread in threading.enumerate() if thread.name == {THREAD!r}]
client, other = it.LabClient("127.0.0.1:9"), it.LabClient("127.0.0.1:9")
assert names() == []
for each in (client, other):
    try:
        each.version()
    except LabError:
        pass
assert names() == [{THREAD!r}]
"""
    run_script(script)


@pytest.mark.slow
def test_a_script_can_end_while_a_stream_is_open():
    with answering(Endless(b"data: {}\n\n", head=EVENT_HEAD, every_s=0.01)) as server:
        run_script(f"""
from lmx_lab.client.lab import LabClient
client = LabClient({server.url!r})
stream = client.events()
next(stream), next(stream)
""")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there is no fork here")
def test_a_forked_child_needs_clients_of_its_own():
    with answering(ALIVE) as server:
        output = run_script(f"""
import os, sys
from lmx_lab.client.lab import LabClient
from lmx_lab.errors import HostingError
client = LabClient({server.url!r})
unused = LabClient({server.url!r})
assert client.version() == "0"
child = os.fork()
if not child:
    try:
        client.version()
    except HostingError as exc:
        assert "forked" in str(exc)
        client.close()
        assert unused.version() == LabClient({server.url!r}).version() == "0"
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(client.version())
""")
    assert output == "0\n"


def test_a_closed_client_refuses_calls():
    with answering(ALIVE) as server:
        client = LabClient(server.url)
        assert client.version() == "0"
        client.close()
        client.close()
        for call in (client.version, lambda: next(client.events())):
            with pytest.raises(errors.HostingError, match="closed"):
                call()
        assert repr(client) == f"<LabClient of {server.url}>"


def test_deleting_a_client_closes_its_connections():
    closed = threading.Event()

    async def close() -> None:
        closed.set()

    portal = ClientPortal(close)
    portal.run(asyncio.sleep(0))
    gc.disable()
    try:
        del portal
        assert closed.wait(20)
    finally:
        gc.enable()
