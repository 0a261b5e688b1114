"""Test that interrupting a load cancels it, in a launched lab and in an attached one."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

import lmx_lab
from lmx_lab.engine.cancellation import Cancellation
from lmx_lab.engine.echo.engine import EchoEngine
from tests.support.labs import serving

WAIT_S = 30.0


@pytest.mark.parametrize(
    ("where", "load"),
    [
        ("here", lambda lab: lab.load("echo")),
        ("elsewhere", lambda lab: lab.load("echo")),
        ("here", lambda lab: lab.compare(["hello"], [{"model": "echo"}])),
    ],
)
def test_an_interrupt_cancels_the_load(tmp_path, monkeypatch, where, load):
    started, ended = threading.Event(), threading.Event()

    def hang(engine: EchoEngine, entry: Any, spec: Any, cancellation: Cancellation, **_: Any) -> None:
        started.set()
        try:
            while True:
                cancellation.check()
                time.sleep(0.01)
        finally:
            ended.set()

    def interrupt() -> None:
        started.wait(WAIT_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with serving(tmp_path, None) as server:
        lab = server if where == "here" else lmx_lab.attach(server.url)
        with monkeypatch.context() as patched:
            patched.setattr(EchoEngine, "check", hang)
            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):
                load(lab)
        assert ended.wait(WAIT_S)
        # The load has ended, so that another one is not refused.
        assert lab.load("echo").model == "echo"
        if where == "elsewhere":
            lab.stop()
