"""Tests that a streamed chat passes few modules on its way from the socket to the engine step and back.

A module is on the way if one of its functions is on the call stack where the request or a token is passed on: from the
socket to the HTTP server, to the engine's thread, to the engine step, back to the reader's event loop, and to the
socket. Functions that only compute something for these modules are not.
"""

import sys
import threading
from pathlib import Path

import httpx2
import pytest

import lmx_lab
from tests.support.asking import chat_body
from tests.support.labs import serving, wait_until_idle

HANDOVERS = {
    *("http.connections.HttpProtocol.data_received", "http.streaming.while_connected"),
    *("http.streaming.EventStream.stream_response", "http.streaming.SendWatch.send"),
    *("http.middleware.ResponseHeaders.__call__.<locals>.send_with_headers", "engine.stream.Mailbox.deliver"),
    "engine.stream.Answer.__anext__",
}
"""Functions that pass on a request or a token."""
ECHO = {"portal.LoopThread.submit", "engine.echo.engine.EchoRounds.schedule", "engine.echo.engine.EchoRounds._generate"}
MLX = {"engine.mlx.thread.MlxThread.post", "engine.mlx.batch.Batch.insert", "engine.mlx.batch.Batch.step"}


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or a coverage tool is active")
@pytest.mark.parametrize(("model", "settings"), [("echo", {}), ("echo", {"swap": True}), ("tiny", {})])
def test_a_streamed_chat_passes_few_modules(request, model, settings):
    home = request.getfixturevalue("echo_home" if model == "echo" else "tiny_home")
    handovers, package = HANDOVERS | (ECHO if model == "echo" else MLX), Path(lmx_lab.__file__).parent
    recording, passed, modules = threading.Event(), set(), {}

    def profile(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if not recording.is_set() or event != "call" or not path.is_relative_to(package):
            return
        name = f"{'.'.join(path.relative_to(package).with_suffix('').parts)}.{frame.f_code.co_qualname}"
        if name in handovers:
            passed.add(name)
            while frame is not None:
                if (path := Path(frame.f_code.co_filename)).is_relative_to(package):
                    modules[".".join(path.relative_to(package).with_suffix("").parts)] = None
                frame = frame.f_back

    threading.setprofile(profile)
    try:
        with serving(home, model, **settings) as lab, httpx2.Client(base_url=lab.url) as client:
            # The first chat fills the caches.
            for _ in range(2):
                body = chat_body(model="default", stream=True, max_tokens=5)
                assert client.post("/v1/chat/completions", json=body).text.endswith("data: [DONE]\n\n")
                wait_until_idle(lab)
                recording.set()
            recording.clear()
    finally:
        threading.setprofile(None)
    print(f"{len(modules)} modules on the way:", *modules, sep="\n  ")
    assert passed == handovers
    assert len(modules) <= 20
