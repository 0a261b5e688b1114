"""Text of models and tools on a terminal, and events as lines."""

from __future__ import annotations

import pytest

from lmx_lab.cli import commands
from lmx_lab.cli.entry import run
from lmx_lab.cli.event_printer import as_json
from lmx_lab.cli.terminal import line, shown
from lmx_lab.errors import LabError
from lmx_lab.wire.event_stream import Envelope


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("Grüße, 你好 🙂", "Grüße, 你好 🙂"),
        ("\x1b[2Jgone\x07", "\\x1b[2Jgone\\x07"),
        ("abc\u202edef\u2066", "abc\\u202edef\\u2066"),
        ("back\rspace\x08", "back\\rspace\\x08"),
        ("\u200d joins", "\u200d joins"),
    ],
)
def test_text_of_models_does_nothing_to_a_terminal(text: str, safe: str) -> None:
    assert shown(text) == safe


def test_json_is_ascii_and_says_the_same() -> None:
    said = {"text": "\x9b2J é \u202e", "nothing": None}
    event = Envelope(event="new.kind", seq=1, at="2026-11-21T10:00:00.123Z", stream_id="stm", data=said)
    assert as_json(event).isascii()
    assert Envelope.model_validate_json(as_json(event)) == event


def test_what_a_server_says_in_an_error_does_nothing_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise LabError("gone\x1b[2J")

    monkeypatch.setattr(commands, "app", fail)
    assert run() == 1
    assert "gone\\x1b[2J" in capsys.readouterr().err


def test_a_line_is_one_line() -> None:
    assert line("a\n b" + "c" * 200, most=10) == "a bcccccc…"
