"""Reading the servers of a ``.mcp.json``, and making the output of MCP servers safe to display."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.daemon.mcp.config import SecretRedactor, last_lines, read_mcp_file
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
