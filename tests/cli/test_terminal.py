"""Tests of text on a terminal, and of events as lines."""

from __future__ import annotations

from lmx_lab.cli import app as application
from lmx_lab.cli.app import run
from lmx_lab.cli.event_printer import as_line_of_json
from lmx_lab.cli.terminal import single_line
from lmx_lab.errors import LabError
from lmx_lab.wire.events import Envelope


def test_an_event_as_json_is_ascii_and_can_be_parsed():
    data = {"text": "\x9b2J é \u202e", "nothing": None}
    event = Envelope(event="new.kind", seq=1, at="2026-11-21T10:00:00.123Z", stream_id="stm", data=data)
    assert as_line_of_json(event).isascii()
    assert Envelope.model_validate_json(as_line_of_json(event)) == event


def test_control_characters_in_an_error_are_escaped(monkeypatch, capsys):
    def fail(_: object) -> None:
        raise LabError("gone\x1b[2J")

    monkeypatch.setattr(application, "app", fail)
    assert run() == 1
    assert "gone\\x1b[2J" in capsys.readouterr().err


def test_a_text_is_shortened_to_one_line():
    assert single_line("a\n b" + "c" * 200, most=10) == "a bcccccc…"
