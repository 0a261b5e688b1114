"""Results of MCP tools become text, whatever their parts are."""

from types import SimpleNamespace

import pytest

from lmx_lab.daemon.mcp import connection
from lmx_lab.daemon.mcp.connection import tool_result


def part(kind, **fields):
    return SimpleNamespace(type=kind, **fields)


def resource(**fields):
    return part("resource", resource=SimpleNamespace(uri="file:///a", mime_type=None, **fields))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], "(no result)"),
        ([part("text", text="a"), part("text", text=""), part("text", text="b")], "a\nb"),
        (
            [part("audio", mime_type="audio/wav", data="AAAA")],
            "[audio of type audio/wav, 3 bytes; it cannot be shown here]",
        ),
        ([part("resource_link", uri="file:///a", title=None, name="A\n1")], "[link to the resource file:///a A 1]"),
        ([resource(text="inside")], "[resource file:///a]\ninside"),
        ([resource(blob="AAAAAAAA")], "[resource file:///a, 6 bytes; it cannot be shown here]"),
        ([part("video")], "[content of type video; it cannot be shown here]"),
    ],
)
def test_each_part_becomes_text(content, text):
    assert tool_result(content, None, is_error=False).text == text


def test_a_structured_result_is_shown_only_without_text():
    image = part("image", mime_type="image/png", data="")
    shown = tool_result([image], {"é": 1}, is_error=False).text
    assert shown == '{"é": 1}\n[image of type image/png, 0 bytes; it cannot be shown here]'
    assert tool_result([part("text", text="a")], {"b": 1}, is_error=False).text == "a"


def test_an_error_has_a_message():
    failed = tool_result([], None, is_error=True)
    assert (failed.status, failed.text) == ("error", "The tool failed without a message.")


def test_a_long_result_is_cut(monkeypatch):
    monkeypatch.setattr(connection, "TEXT_CHARACTERS", 5)
    parts = [part("text", text="abc"), part("text", text="def"), part("text", text="ghi")]
    assert tool_result(parts, None, is_error=False).text == "abc\nd"
