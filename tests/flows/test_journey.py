"""Tests that a streamed chat passes few modules on its way from the socket to the engine step and back.

A module is on the way if one of its functions is on the call stack where the request or a token is passed on: from the
socket to the HTTP server, to the engine's thread, to the engine step, back to the reader's event loop, and to the
socket. Functions that only compute something for these modules are not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import pytest

import lmx_lab
from tests.support.asking import chat_body
from tests.support.labs import serving, wait_until_idle

PACKAGE = Path(lmx_lab.__file__).parent
LIMIT = 20
HANDOVERS = {
    "http.connections": {"HttpProtocol.data_received"},
    "http.streaming": {"while_connected", "EventStream.stream_response", "_TimedConnection.send_body"},
    "http.middleware": {"AnswerHeaders.__call__.<locals>.send_with_headers"},
    "http.paced_transport": {"PacedTransport.__getattr__"},
    "portal": {"LoopThread.submit"},
    "engine.stream": {"Mailbox.deliver", "Answer.__anext__"},
    "engine.echo.queue": {"EchoQueue.add", "EchoQueue._step"},
    "engine.mlx.thread": {"EngineThread.post"},
    "engine.mlx.batch": {"Batch.insert", "Batch.step"},
}
"""Functions by module that pass on a request or a token."""


class Journey:
    """Records the modules that a request passes, on all threads that start while it is active."""

    def __init__(self) -> None:
        self.recording = False
        self.handovers: set[str] = set()
        self.path: dict[str, None] = {}
        """The modules on the way, in the order in which they were reached."""
        self.touched: set[str] = set()
        """All modules of the package in which a function was called."""
        self._modules: dict[str, str | None] = {}

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.recording or event != "call" or (module := self._module(frame)) is None:
            return
        self.touched.add(module)
        if frame.f_code.co_qualname in HANDOVERS.get(module, ()):
            self.handovers.add(f"{module}.{frame.f_code.co_qualname}")
            self.path.update(dict.fromkeys(reversed(list(self._stack(frame)))))

    def _stack(self, frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            if (module := self._module(frame)) is not None:
                yield module
            frame = frame.f_back

    def _module(self, frame: FrameType) -> str | None:
        """Return the name of the module below the package; None for other code."""
        file = frame.f_code.co_filename
        if file not in self._modules:
            path = Path(file)
            inside = path.is_relative_to(PACKAGE)
            self._modules[file] = ".".join(path.relative_to(PACKAGE).with_suffix("").parts) if inside else None
        return self._modules[file]


@pytest.fixture
def journey():
    journey = Journey()
    threading.setprofile(journey.profile)
    yield journey
    threading.setprofile(None)


def record(journey, lab):
    """Record one streamed chat, after another one that has filled the caches."""
    body = chat_body(model="default", stream=True, max_tokens=5)
    with httpx2.Client(base_url=lab.url, timeout=60) as client:
        for recording in (False, True):
            wait_until_idle(lab)
            journey.recording = recording
            assert client.post("/v1/chat/completions", json=body).text.endswith("data: [DONE]\n\n")
        journey.recording = False
    print(f"{len(journey.path)} modules on the way:", *journey.path, sep="\n  ")
    print(f"{len(journey.touched)} modules touched:", *sorted(journey.touched), sep="\n  ")


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or a coverage tool is active")
@pytest.mark.parametrize("swap", [False, True])
def test_a_streamed_chat_on_echo_passes_few_modules(journey, echo_home, swap):
    with serving(echo_home, "echo", swap=swap) as lab:
        record(journey, lab)
    assert {"portal.LoopThread.submit", "engine.echo.queue.EchoQueue._step"} <= journey.handovers
    assert {
        "http.connections.HttpProtocol.data_received",
        "http.streaming._TimedConnection.send_body",
    } <= journey.handovers
    assert len(journey.path) <= LIMIT
    assert "engine.model_control" not in journey.path


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or a coverage tool is active")
def test_a_streamed_chat_on_mlx_passes_few_modules(journey, tiny_home):
    with serving(tiny_home, "tiny") as lab:
        record(journey, lab)
    assert {"engine.mlx.thread.EngineThread.post", "engine.mlx.batch.Batch.step"} <= journey.handovers
    assert len(journey.path) <= LIMIT
