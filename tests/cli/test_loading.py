"""Tests of ``lmx-lab load`` and ``lmx-lab unload`` with a running lab."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lmx_lab.notebook.lab import Lab
from tests.support.asking import ENDLESS
from tests.support.commands import Ended, Running, run_command
from tests.support.labs import PACE, serving
from tests.support.waiting import until

UNUSED_PORT = 9
"""The port of the discard service, which no program uses."""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with serving(tmp_path / "lab", "echo", echo_tokens_per_s=PACE, drain_s=600) as lab:
        yield lab


def run(lab: Lab, *arguments: str, **options: Any) -> Ended:
    # The terminal shows progress.
    environ = {"LMX_LAB_PORT": str(lab.port), "TERM": "xterm"}
    return run_command(lab.settings.home, *arguments, environ=environ, **options)


def test_a_model_is_unloaded_and_loaded(lab: Lab) -> None:
    done = run(lab, "unload")
    assert (done.status, done.stdout) == (0, "unloaded, 0.00 GB freed\n"), done.stderr
    done = run(lab, "unload", "--now")
    assert (done.status, done.stdout) == (0, "no model was unloaded\n"), done.stderr
    done = run(lab, "unload", "echo")
    assert (done.status, "echo is not loaded, no model is" in done.stderr) == (2, True)
    done = run(lab, "load", "echo", "--engine", "mlx")
    assert (done.status, "invalid-request: " in done.stderr) == (2, True), done.stderr
    done = run(lab, "load", "echo")
    assert (done.status, done.stdout[:15]) == (0, "echo loaded in "), done.stderr


@pytest.mark.slow
def test_an_unload_says_what_it_waits_for_and_continues_after_ctrl_c(lab: Lab) -> None:
    def interrupt(running: Running) -> None:
        running.wait_for("echo: unloading, 1 answer left (")
        running.send_signal(signal.SIGINT)

    def stop_answer(running: Running) -> None:
        until(lambda: "no time limit" in str(lab.engine.snapshot.unloading))
        stream.close()

    with closing(lab.chat("hello", stream=True, **ENDLESS)) as stream:
        pieces = iter(stream)
        next(pieces)
        done = run(lab, "unload", meanwhile=interrupt, terminal=True)
        assert done.status == 130
        assert "the unload continues; lmx-lab unload --now stops" in done.stdout
        assert lab.engine.snapshot.unloading is not None
        # In a file, each change is a line.
        done = run(lab, "unload", "echo", "--wait", meanwhile=stop_answer)
        assert (done.status, done.stdout) == (0, "unloaded, 0.00 GB freed\n")
        assert done.stderr == "echo: unloading, 1 answer left (no time limit)\n"


def test_without_a_lab_the_address_is_named(tmp_path: Path) -> None:
    for command in (("unload",), ("load", "echo")):
        done = run_command(tmp_path, *command, environ={"LMX_LAB_PORT": str(UNUSED_PORT)})
        assert (done.status, f"127.0.0.1:{UNUSED_PORT}" in done.stderr) == (1, True)
