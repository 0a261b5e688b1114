import logging
import sys

import pytest

from lmx_lab.sanitize import (
    LastResortHandler,
    LogFormatter,
    RecentLinesHandler,
    escape_text,
    replace_surrogates,
    single_line,
)

ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b1m\u202eright-to-left\u2066\r\b"
"""Colours, a window title, a C1 control, bidirectional overrides, a carriage return and a backspace."""
CONTROLS = set("\x1b\x07\x9b\u202e\u2066\r\b")


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("Grüße, 你好 🙂", "Grüße, 你好 🙂"),
        ("\x1b[2Jgone\x07\x00", "\\x1b[2Jgone\\x07\\x00"),
        ("abc\u202edef\u2066", "abc\\u202edef\\u2066"),
        ("back\rspace\x08", "back\\rspace\\x08"),
        ("\u2028\ud800", "\\u2028\\ud800"),
        ("\U000e0001\U000e0041\ufff9\u206a", "\\U000e0001\\U000e0041\\ufff9\\u206a"),
        # Joiners, direction marks and soft hyphens are parts of words; Arabic has visible formatting characters.
        *[
            (text, text)
            for text in ("\u200d joins", "\u0646\u200c\u0645", "\u200e\u200f\u061c", "co\u00adop", "\u0600", "a\u00a0b")
        ],
    ],
)
def test_control_characters_are_escaped(text, safe):
    assert escape_text(text) == safe


def test_lone_surrogates_are_replaced():
    assert replace_surrogates("a\ud800b 🙂") == "a?b 🙂"


def log_record(message, level=logging.INFO):
    return logging.LogRecord("lmx_lab", level, "", 0, "%s", (message,), None)


def test_a_log_message_is_one_line_without_control_characters():
    line = LogFormatter("%(levelname)s %(message)s").format(log_record(f"GET /{ESCAPES}\n2026-01-01 ERROR forged"))
    assert "\n" not in line
    assert line == escape_text(line)
    assert "\\x1b[31mred" in line


def test_a_traceback_in_a_log_keeps_its_lines_but_no_control_characters():
    try:
        raise ValueError(ESCAPES)
    except ValueError:
        record = logging.LogRecord("lmx_lab", logging.ERROR, "", 0, "bug", (), sys.exc_info())
    text = LogFormatter("%(levelname)s %(message)s").format(record)
    assert text.count("\n") >= 3
    assert not set(text) & CONTROLS


@pytest.mark.parametrize(("configured", "printed"), [(False, "\\x1b[31mred"), (True, "")])
def test_warnings_are_printed_escaped_until_logging_is_configured(configured, printed, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()] if configured else [])
    LastResortHandler().handle(log_record("\x1b[31mred", logging.WARNING))
    assert capsys.readouterr().err.strip() == printed


def test_the_warnings_of_excluded_loggers_are_not_printed(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    handler = LastResortHandler(without=("lmx_lab.server",))
    for name in ("lmx_lab.server.chat", "lmx_lab.engine"):
        handler.handle(logging.LogRecord(name, logging.WARNING, "", 0, f"from {name}", (), None))
    assert capsys.readouterr().err.strip() == "from lmx_lab.engine"


def test_only_the_most_recent_log_lines_are_kept_in_memory():
    handler = RecentLinesHandler(2)
    for message in ("first", "second", "x" * 10_000):
        handler.handle(log_record(message))
    assert len(handler.lines) == 2
    assert handler.lines[0].endswith(" INFO second")
    assert len(handler.lines[1]) == 4000


def test_a_text_is_shortened_to_one_line():
    assert single_line("a\n b" + "c" * 200, most=10) == "a bcccccc…"
    assert single_line("a\x1b[2J " + " " * 100 + "b", most=10) == "a\\x1b[2J…"
    assert single_line(" a\tb\n", most=10) == "a b"
