"""All tools under one roof, proposals from files, and names and lines that nobody can trust."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab.daemon.mcp.project_file import read_mcp_file
from lmx_lab.daemon.mcp.redaction import SecretRedactor, last_lines
from lmx_lab.daemon.mcp.stdio import LineSplitter, OutputTail
from lmx_lab.daemon.tools.python_tools import PythonTools
from lmx_lab.daemon.tools.tool import mcp_tool_names
from lmx_lab.daemon.tools.toolbox import CombinedToolbox
from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.mcp import ChangeMcpServer, McpServerConfig
from tests.daemon.mcp_place import Place, hostile, opened_place


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with opened_place(tmp_path) as place:
        yield place


@pytest.mark.anyio
async def test_python_functions_and_mcp_tools_are_called_by_their_names(place: Place) -> None:
    python = PythonTools()
    toolbox = CombinedToolbox(python, place.servers)
    python.register(lambda: "of Python", name="zebra")
    python.register(lambda: "no", name="denied", permission="deny")
    await place.ready(hostile())
    names = [tool.name for tool in toolbox.list_tools()]
    assert names == sorted(names)
    assert {"zebra", "bad__echo"} <= set(names)
    assert "denied" not in names
    assert (await toolbox.call("zebra", {}, on_progress=print)).text == "of Python"
    assert (await toolbox.call("bad__echo", {"text": "of MCP"}, on_progress=print)).text == "of MCP"
    for missing in ("nobody", "bad__nothing", "other__echo", "denied", ""):
        result = await toolbox.call(missing, {}, on_progress=print)
        assert (result.status, "no longer exists" in result.text) == ("error", True)


@pytest.mark.anyio
async def test_the_absence_of_a_tool_is_explained_by_the_state_of_its_server(place: Place) -> None:
    toolbox = CombinedToolbox(PythonTools(), place.servers)
    await place.servers.add(McpServerConfig(name="lost", command="/no/such/program"))
    await place.servers.add(McpServerConfig(name="off", command="cat", enabled=False))
    await place.until("lost", lambda server: server.state == "failed")
    failed = await toolbox.explain_absence("lost__echo")
    assert failed is not None
    assert failed.startswith("the MCP server 'lost' has failed")
    assert "/no/such/program" in failed
    assert failed in (await toolbox.call("lost__echo", {}, on_progress=print)).text
    assert "disabled" in (await toolbox.explain_absence("off__echo") or "")
    for name in ("lost", "nobody__echo", "", "required"):
        assert await toolbox.explain_absence(name) is None


@pytest.mark.anyio
async def test_a_server_that_is_ready_explains_an_absence_only_by_its_permission(place: Place) -> None:
    toolbox = CombinedToolbox(PythonTools(), place.servers)
    await place.ready(hostile())
    assert await toolbox.explain_absence("bad__nothing") is None
    await place.servers.change("bad", ChangeMcpServer(permission="deny"))
    assert "denied" in (await toolbox.explain_absence("bad__echo") or "")


# Files


def written(folder: Path, content: object) -> Path:
    path = folder / ".mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_servers_of_a_project_file_are_read(tmp_path: Path) -> None:
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
def test_the_error_of_an_invalid_file_names_the_place(tmp_path: Path, content: object, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read_mcp_file(written(tmp_path, content))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_mcp_file(tmp_path / "none.json")


# Names, lines, secrets


@given(st.lists(st.text(min_size=1, max_size=100), unique=True, max_size=20))
def test_names_for_models_are_valid_and_map_to_the_servers_names(own: list[str]) -> None:
    names = mcp_tool_names("server-1", own)
    assert list(names.values()) == own
    assert all(len(name) <= 64 and name.isascii() and name.startswith("server-1__") for name in names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") for name in names)


@given(st.lists(st.sampled_from([b"", b"a", b"\n", b"bcd\n", b"e" * 9, b"\n\nf"]), max_size=30))
def test_lines_do_not_depend_on_how_the_stream_is_cut(pieces: list[bytes]) -> None:
    lines = LineSplitter(limit=8)
    found = [line for piece in pieces for line in lines.feed(piece)]
    *whole, rest = b"".join(pieces).split(b"\n")
    wanted = [line if len(line) <= 8 else None for line in whole] + [None] * (len(rest) > 8)
    assert found == wanted


def test_a_tail_is_short_printable_and_without_secrets() -> None:
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
