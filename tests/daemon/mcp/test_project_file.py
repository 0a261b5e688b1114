"""Reading the servers of a ``.mcp.json``."""

import json

import pytest

from lmx_lab.daemon.mcp.project_file import read_mcp_file
from lmx_lab.errors import InvalidRequestError


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
