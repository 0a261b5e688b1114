"""Tests of ``lmx-lab chat`` without a daemon: with an engine in this process, and with a lab that runs."""

from __future__ import annotations

from pathlib import Path

from lmx_lab.notebook.lab import Lab
from lmx_lab.settings import Settings
from tests.support.commands import Running, run_command

UNUSED_PORT = 9
"""The port of the discard service, which no program uses."""


def at_port(port: int) -> dict[str, str]:
    return {"LMX_LAB_PORT": str(port)}


def test_a_named_model_answers_one_question_or_several(tmp_path: Path) -> None:
    environ = at_port(UNUSED_PORT)
    done = run_command(tmp_path, "chat", "-m", "echo", "Say", "hello.", environ=environ)
    assert (done.status, done.stdout) == (0, "Say hello.\n"), done.stderr
    assert "in this process" in done.stderr
    assert "first token" in done.stderr

    def converse(terminal: Running) -> None:
        for question in ("one", "two"):
            terminal.wait_for("> ")
            terminal.type(f"{question}\n")
            terminal.wait_for("first token")
        terminal.wait_for("> ")
        terminal.type("\x04")

    ended = run_command(tmp_path, "chat", "-m", "echo", terminal=True, meanwhile=converse, environ=environ)
    assert ended.status == 0


def test_a_running_lab_answers_with_its_model(tmp_path: Path) -> None:
    with Lab(Settings(home=tmp_path / "lab", port=0), loop="thread") as lab:
        lab.load("echo")
        done = run_command(tmp_path, "chat", "hello", environ=at_port(lab.port))
    assert (done.status, done.stdout) == (0, "hello\n"), done.stderr
    assert f"the lab at {lab.url} answers, with echo" in done.stderr


def test_without_a_lab_and_without_a_model_the_error_names_both_remedies(tmp_path: Path) -> None:
    done = run_command(tmp_path, "chat", "hello", environ=at_port(UNUSED_PORT))
    assert (done.status, done.stdout) == (1, "")
    assert "lmx-lab chat -m" in done.stderr
    assert "lmx-lab serve" in done.stderr
