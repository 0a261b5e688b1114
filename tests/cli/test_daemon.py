"""``lmx-lab daemon --mcp-config`` before somebody who can be asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmx_lab.cli import daemon
from lmx_lab.cli.entry import run
from tests.cli.test_chat import Terminal
from tests.cli.test_serve import MCP

QUESTION = "Add them?"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    file = tmp_path / ".mcp.json"
    file.write_text(json.dumps(MCP))
    return ["daemon", "--port", "0", "--mcp-config", str(file)]


@pytest.mark.parametrize(("typed", "added"), [("y\n", True), ("\n", False), ("\x04", False)], ids=["yes", "no", "end"])
def test_servers_of_a_file_are_added_after_a_yes_alone(
    tmp_path: Path, arguments: list[str], typed: str, added: bool
) -> None:
    with Terminal(tmp_path, *arguments) as terminal:
        assert "/no/such/program 'a b'" in terminal.wait_for(QUESTION)
        terminal.type(typed)
        assert ("added none" in terminal.wait_for("The daemon is ready")) == added


def test_ctrl_c_at_the_question_starts_nothing(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path))
    monkeypatch.setattr(daemon, "can_be_asked", lambda: True)
    monkeypatch.setattr(daemon, "asked", interrupted)
    assert run(arguments) == 130
    assert not (tmp_path / "daemon").exists()
