"""Reading the servers of a ``.mcp.json``, making the output of MCP servers safe to display, and converting results."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.daemon.mcp.config import SecretRedactor, last_lines, read_mcp_file
from lmx_lab.daemon.mcp.connection import tool_result
from lmx_lab.daemon.mcp.process import LineSplitter, OutputTail
from lmx_lab.errors import InvalidRequestError


def test_short_secrets_are_redacted_too():
    assert SecretRedactor(["1234", "abc"]).redact("1234 abc") == "*** abc"
    assert SecretRedactor(["1234", "abc"]).redact_bytes(b"1234 abc") == b"*** abc"


def test_a_tail_is_short_printable_and_without_secrets():
    tail = OutputTail(20_480)
    secret = "very-secret-value"
    for number in range(1000):
        tail.feed(f"line {number} \x1b[31m{secret}\x00\r\nüñ\u202e\n".encode())
    text = last_lines(SecretRedactor([f"Bearer {secret}", "short"]).redact(tail.text()))
    assert len(text.encode()) <= 16_384
    assert len(text.splitlines()) == 50
    assert text.splitlines()[-2] == "line 999 \ufffd[31m***\ufffd"
    assert secret not in text
    tail.feed(b"x" * 100_000)
    assert len(tail.text()) <= 20_480
    assert last_lines(tail.text()) == "x" * 2000


@given(st.lists(st.sampled_from([b"", b"a", b"\n", b"bcd\n", b"e" * 9, b"\n\nf"]), max_size=30))
def test_lines_do_not_depend_on_how_the_stream_is_cut(pieces):
    lines = LineSplitter(limit=8)
    found = [line for piece in pieces for line in lines.feed(piece)]
    *whole, rest = b"".join(pieces).split(b"\n")
    wanted = [line if len(line) <= 8 else None for line in whole] + [None] * (len(rest) > 8)
    assert found == wanted


def written(folder, content):
    path = folder / ".mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_servers_of_a_project_file_are_read(tmp_path):
    servers = {
        "my files": {"command": "npx", "args": ["-y", "files", "."], "env": {"KEY": "1"}, "type": "stdio"},
        "remote.one": {"type": "http", "url": "https://host/mcp", "headers": {"A": "b"}},
        "off": {"command": "x", "cwd": "sub", "disabled": True},
    }
    files, remote, off = read_mcp_file(written(tmp_path, {"mcpServers": servers}))
    assert (files.name, files.args, files.env, files.cwd) == (
        "my-files",
        ("-y", "files", "."),
        {"KEY": "1"},
        str(tmp_path),
    )
    assert (remote.name, remote.transport, remote.url) == ("remote-one", "http", "https://host/mcp")
    assert (off.enabled, off.cwd) == (False, str(tmp_path / "sub"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not valid JSON"),
        ([], "mcpServers"),
        ({"mcpServers": []}, "mcpServers"),
        ({"mcpServers": {"a": 1}}, "server 'a'"),
        ({"mcpServers": {"a": {}}}, "command"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://h/"}}}, "command"),
        ({"mcpServers": {"a": {"command": "x", "args": "y"}}}, "args"),
        ({"mcpServers": {"a": {"command": "x", "env": {"KEY": 1}}}}, "env.KEY"),
        ({"mcpServers": {"a": {"command": "x", "env": {"KEY": "${HOME}"}}}}, r"\$\{HOME\}"),
        ({"mcpServers": {"a": {"command": "x", "shell": True}}}, "'shell'"),
        ({"mcpServers": {"a": {"type": "sse", "url": "http://h/"}}}, "sse"),
        ({"mcpServers": {"a": {"command": "x", "cwd": 3}}}, "cwd"),
        ({"mcpServers": {"!!": {"command": "x"}}}, "name"),
        ({"mcpServers": {str(number): {"command": "x"} for number in range(65)}}, "65"),
        (" " * 2_000_000, "bytes"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_the_error_of_an_invalid_file_names_the_place(tmp_path, content, said):
    with pytest.raises(InvalidRequestError, match=said):
        read_mcp_file(written(tmp_path, content))


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_mcp_file(tmp_path / "none.json")


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
    assert tool_result([], {"b": [float("nan")]}, is_error=False).text == '{"b": ["NaN"]}'


def test_an_error_has_a_message():
    failed = tool_result([], None, is_error=True)
    assert (failed.status, failed.text) == ("error", "The tool failed without a message.")


def test_a_long_result_is_cut():
    parts = [part("text", text="abc"), part("text", text="def"), part("text", text="ghi")]
    assert tool_result(parts, None, is_error=False, limit_characters=5).text == "abc\nd"
